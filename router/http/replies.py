"""Answers in OpenAI's JSON: whole bodies, and the events of a stream.

An event is one token's chunk as server-sent event (WHATWG HTML, section 9.2: `data:`, JSON, blank
line). The last chunk of an answer, and every whole body, carries beside OpenAI's fields an object
`twophase` with the phases. Pure: chunks and completions in, bytes out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.completion import Chunk, Completion
from core.request import Usage
from core.timeline import Phases
from router.http.body import Body, Kind
from router.http.errors import Problem
from router.http.logprobs import (
    NO_ECHO,
    BytesOf,
    Echo,
    Json,
    chat_logprobs,
    joined,
    text_logprobs,
)
from router.several import Delivery

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Sent:
    """What the earlier events of a stream held."""

    num_tokens: int = 0
    num_characters: int = 0

    def after(self, chunks: Sequence[Chunk]) -> "Sent":
        """With some more chunks."""
        return Sent(
            self.num_tokens + sum(len(chunk.token_ids) for chunk in chunks),
            self.num_characters + sum(len(chunk.text) for chunk in chunks),
        )


@dataclass(frozen=True, slots=True)
class Replies:
    """Writes the answer to one request; `created` is Unix time in seconds."""

    kind: Kind
    body: Body
    request_id: str
    model: str
    created: int
    bytes_of: BytesOf

    def whole(
        self, chunks: list[Chunk], completions: Sequence[Completion], echo: Echo = NO_ECHO
    ) -> bytes:
        """The body of answers that are not streamed; completions by index."""
        sent = Sent(num_characters=len(echo.text))
        choices = []
        for index, completion in enumerate(completions):
            mine = [chunk for chunk in chunks if chunk.index == index]
            message, reason = self._message(mine, echo.text), completion.finish_reason
            choice = self._choice(message, mine, reason, sent, index=index)
            if echo.logprobs is not None:
                choice["logprobs"] = joined(echo.told(self.bytes_of), choice["logprobs"])
            if index > 0:  # that of choice 0 stands beside them all
                choice["twophase"] = _twophase(completion)
            choices.append(choice)
        reply = self._frame(is_stream=False) | {
            "choices": choices,
            "usage": _usage(_usage_of_all(completions)),
            "twophase": _twophase(completions[0]),
        }
        return dumped(reply)

    def _message(self, chunks: Sequence[Chunk], before: str) -> Json:
        text = before + "".join(chunk.text for chunk in chunks)
        if self.kind is Kind.TEXT:
            return {"text": text}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> bytes:
        """The events that open a stream: a chat tells who speaks, once for each choice."""
        if self.kind is Kind.TEXT:
            return b""
        opening: Json = {"delta": {"role": "assistant", "content": ""}}
        indexes = range(self.body.asked.n or 1)
        return b"".join(self._event(self._choice(opening, [], None, index=i)) for i in indexes)

    def echo(self, echo: Echo, index: int) -> tuple[bytes, Sent]:
        """The event that tells a choice's prompt, and what was sent with it."""
        choice = self._choice({"text": echo.text}, [], None, index=index)
        choice["logprobs"] = echo.told(self.bytes_of)
        return self._event(choice), Sent(num_characters=len(echo.text))

    def events(self, delivery: Delivery, sent: Sent) -> bytes:
        """One event for each chunk of a delivery; `sent` is what its answer's earlier ones held."""
        num_prompt_tokens, events = delivery.request.num_prompt_tokens, []
        for chunk in delivery.chunks:
            choice = self._choice(
                self._piece(chunk), [chunk], _reason(chunk), sent, index=chunk.index
            )
            sent = sent.after([chunk])
            usage = None
            if self.body.stream_options.continuous_usage_stats:
                usage = _usage(Usage(num_prompt_tokens, sent.num_tokens))
            more: Json = {}
            if chunk.completion is not None:
                more["twophase"] = _twophase(chunk.completion)
            events.append(self._event(choice, usage, more))
        return b"".join(events)

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """The events that end a stream whose answers are all complete."""
        if not self.body.stream_options.include_usage:
            return DONE
        usage = _usage(_usage_of_all(completions))
        return _sse(self._frame(is_stream=True) | {"choices": [], "usage": usage}) + DONE

    def _event(self, choice: Json, usage: Json | None = None, more: Json | None = None) -> bytes:
        frame = self._frame(is_stream=True) | {"choices": [choice]}
        if self.body.stream_options.include_usage or usage is not None:
            frame["usage"] = usage
        return _sse(frame | (more or {}))

    def _piece(self, chunk: Chunk) -> Json:
        if self.kind is Kind.TEXT:
            return {"text": chunk.text}
        is_last = chunk.completion is not None
        return {"delta": {} if is_last and not chunk.text else {"content": chunk.text}}

    def _choice(
        self,
        piece: Json,
        chunks: list[Chunk],
        finish_reason: str | None,
        sent: Sent = Sent(),
        *,
        index: int,
    ) -> Json:
        choice = {
            "index": index,
            **piece,
            "logprobs": self._logprobs(chunks, sent),
            "finish_reason": finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = [i for chunk in chunks for i in chunk.token_ids]
        return choice

    def _logprobs(self, chunks: list[Chunk], sent: Sent) -> Json | None:
        with_logprobs = [chunk for chunk in chunks if chunk.logprobs]
        if not with_logprobs:
            return None
        if self.kind is Kind.CHAT:
            return chat_logprobs(with_logprobs, self.bytes_of)
        return text_logprobs(chunks, self.bytes_of, sent.num_characters)

    def _frame(self, *, is_stream: bool) -> Json:
        prefix, name = ("chatcmpl", "chat.completion") if self.kind is Kind.CHAT else _TEXT_NAMES
        if is_stream and self.kind is Kind.CHAT:
            name = "chat.completion.chunk"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
        }


_TEXT_NAMES = ("cmpl", "text_completion")


def error_event(problem: Problem) -> bytes:
    """What ends a stream that failed; no [DONE] follows."""
    return _sse(dict(problem.body))


def server_timing(phases: Phases) -> str:
    """The phases as a Server-Timing header (W3C): milliseconds, in the order of their happening."""
    timings = [*phases.items(), ("unaccounted", phases.unaccounted_s), ("total", phases.total_s)]
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in timings)


def _reason(chunk: Chunk) -> str | None:
    return chunk.completion.finish_reason if chunk.completion is not None else None


def _usage_of_all(completions: Sequence[Completion]) -> Usage:
    """The prompt once, and the tokens of all answers to it."""
    num_output_tokens = sum(completion.usage.num_output_tokens for completion in completions)
    return replace(completions[0].usage, num_output_tokens=num_output_tokens)


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_prefill_cached_tokens},
    }


def _twophase(completion: Completion) -> Json:
    phases, usage, transfer = completion.phases, completion.usage, completion.transfer
    return {
        "phases": {
            **{f"{name}_s": seconds for name, seconds in phases.items()},
            "unaccounted_s": phases.unaccounted_s,
            "total_s": phases.total_s,
            "time_to_first_token_s": phases.time_to_first_token_s,
        },
        "prefill_worker": completion.prefill_worker,
        "decode_worker": completion.decode_worker,
        "placement": completion.placement,
        "failures": list(completion.failures),
        "seed": completion.seed,
        "usage": {
            "num_prefill_cached_tokens": usage.num_prefill_cached_tokens,
            "num_decode_cached_tokens": usage.num_decode_cached_tokens,
            "num_transferred_tokens": usage.num_transferred_tokens,
            "num_local_prefill_tokens": usage.num_local_prefill_tokens,
        },
        "transfer": None
        if transfer is None
        else {
            "backend": transfer.backend,
            "num_bytes": transfer.num_bytes,
            "num_pieces": transfer.num_pieces,
            "push_s": transfer.push_s,
            "exposed_s": transfer.exposed_s,
        },
    }


def _sse(content: Json) -> bytes:
    # json escapes line breaks, so one event is one line.
    return b"data: %b\n\n" % dumped(content)


def dumped(content: Json) -> bytes:
    """JSON in UTF-8, on one line."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
