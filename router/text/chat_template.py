"""Chat messages -> one prompt text, by the Jinja template that came with the checkpoint.

The template is foreign code: it runs in an immutable sandbox with the globals that checkpoints
rely on (those that transformers offers), and whatever it raises is a refusal of the request, not
a failure of the router. It does not know token ids; keeping control tokens out of what users
typed is the business of `tokenizer`. Stateless after loading, safe from any thread.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.completion import ChatMessage
from core.errors import InvalidRequest, ModelError

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A compiled template; the same messages always render to the same text on the same day."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; special_tokens (bos_token, ...) become its variables.

        Raises:
            ModelError: the template has a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text, ending where the assistant's answer begins.

        Raises:
            InvalidRequest: on `messages`, when the template refuses them.
        """
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            reason = f"the chat template refuses them: {error}"
            raise InvalidRequest("messages", f"{len(messages)} messages", reason) from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks answers for training; at inference its body is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:  # any JSON value
    return json.dumps(value, ensure_ascii=False, indent=indent)
