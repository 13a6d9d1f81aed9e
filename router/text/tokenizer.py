"""Text and chat messages -> token ids, and ids -> text, as the checkpoint's own files say.

Runs in the router without torch. Everything is read once by `load`; afterwards a Tokenizer never
changes, so any number of threads may use it. Encoding a long text takes about half a second per
megabyte and releases the interpreter lock: call it with `asyncio.to_thread`.

What users type in a chat never becomes a control token. The template's own control tokens do: in
the rendered text, each spot where user content spells a control token, or could complete one
together with the template's text beside it, is preceded by a marker character that occurs nowhere
else; only unmarked control tokens count. A raw prompt is different: it is the caller's own
rendering, and control tokens in it are control tokens.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from core.completion import ChatMessage
from core.errors import InvalidRequest, ModelError
from router.text.byte_level import byte_pieces, length_bound
from router.text.chat_template import ROLES, ChatTemplate
from router.text.control_tokens import ControlTokens

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_MARKERS = range(0xE000, 0xF8FF)  # the private use area: nobody's letters


class Tokenizer:
    """The tokenizer and chat template of one model directory; immutable."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Take ownership of `backend`; use `load` unless the parts are at hand."""
        self.backend = backend
        self._literal = tokenizers.Tokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        self._template = template
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._control = ControlTokens(tuple(self.special_token_ids))
        self.pieces = byte_pieces(backend)
        self._length_bound = length_bound(backend, self.pieces)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer of a directory in Hugging Face format.

        Raises:
            ModelError: tokenizer.json or the chat template is missing or cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory} holds no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(directory / "tokenizer_config.json")
        return cls(
            backend,
            template=_load_template(directory, config),
            eos_token_ids=_load_eos_token_ids(directory, backend, config),
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a raw prompt, with the start token if the checkpoint asks for one.

        Raises:
            InvalidRequest: on `prompt`, when it is empty or not valid Unicode.
        """
        _require_unicode("prompt", text)
        token_ids = _encode_one(self.backend, text, add_special_tokens=True) if text else ()
        if not token_ids:  # also a text of nothing but characters that the vocabulary lacks
            raise InvalidRequest("prompt", "empty", "must hold at least one token")
        return token_ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of a conversation, ending where the assistant's answer begins.

        Raises:
            InvalidRequest: on `messages` or a field of one, when the checkpoint has no template,
                the template refuses them, or a role or a text is not valid.
        """
        if self._template is None:
            raise InvalidRequest("messages", "a chat", "the model has no chat template")
        if not messages:
            raise InvalidRequest("messages", "empty", "must hold at least one message")
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                limit = f"must be one of {', '.join(ROLES)}"
                raise InvalidRequest(f"messages[{index}].role", repr(message.role[:40]), limit)
            _require_unicode(f"messages[{index}].content", message.content)

        marker = _unused_character([self._template.source, *(m.content for m in messages)])
        fenced = [
            ChatMessage(m.role, self._control.mark(m.content, marker=marker)) for m in messages
        ]
        text = self._template.render(fenced)
        if marker not in text:
            return _encode_one(self.backend, text, add_special_tokens=False)
        return self._encode_fenced(text, marker=marker)

    def _encode_fenced(self, text: str, *, marker: str) -> tuple[int, ...]:
        """Ids of rendered text in which only unmarked control tokens are control tokens."""
        pieces = list(self._control.split(text, marker=marker))
        literal = [piece.replace(marker, "") for piece, is_control in pieces if not is_control]
        encoded = iter(self._literal.encode_batch_fast(literal, add_special_tokens=False))
        token_ids: list[int] = []
        for piece, is_control in pieces:
            token_ids += [self.special_token_ids[piece]] if is_control else next(encoded).ids
        return tuple(token_ids)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the prompt's length that costs no encoding; 0 when none is known.

        Lets a text that cannot fit be refused before the time to encode it is spent.
        """
        return self._length_bound.fewest_tokens(text) if self._length_bound else 0

    def bytes_of(self, token_id: int) -> bytes:
        """What one token stands for by itself; may be part of a character."""
        if self.pieces is None:
            return self.decode([token_id]).encode()
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; control tokens are left out, invalid bytes become U+FFFD."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=True)
        return text


def _encode_one(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    # The batch form releases the interpreter lock; `encode` holds it (tokenizers 0.23).
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return tuple(encoding.ids)


def _require_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        value = f"text with a lone surrogate at character {error.start}"
        raise InvalidRequest(name, value, "must be valid Unicode") from error


def _unused_character(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    for code in _MARKERS:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequest("messages", "every private use character", "must leave one unused")


def _load_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json, else None."""
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    names = [name for name in _SPECIAL_TOKEN_NAMES if config.get(name)]
    return ChatTemplate(source, {name: _token_text(config[name]) for name in names})


def _load_eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Every id that ends an answer by any of the three files that may say so.

    Chat checkpoints often name the end of a turn in one file and the end of a text in another.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    if config.get("eos_token"):
        token_id = backend.token_to_id(_token_text(config["eos_token"]))
        found.update([] if token_id is None else [token_id])
    return tuple(sorted(found))


def _token_text(token: str | Mapping[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]


def read_json(path: Path) -> dict[str, Any]:
    """Content of an optional JSON file of the checkpoint; its values are the checkpoint's own."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return content
