"""Answers in OpenAI's JSON: whole bodies, and the events of a stream.

An event is one token's chunk as server-sent event (WHATWG HTML, section 9.2: `data:`, JSON, blank
line). The last chunk of an answer, and every whole body, carries beside OpenAI's fields an object
`twophase` with the phases. Pure: chunks and completions in, bytes out.
"""

import json
from dataclasses import dataclass

from core.completion import Chunk, Completion
from core.request import Usage
from core.timeline import Phases
from router.generation import Delivery
from router.http.body import Body, Kind
from router.http.errors import Problem

Json = dict[str, object]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Replies:
    """Writes the answer to one request; `created` is Unix time in seconds."""

    kind: Kind
    body: Body
    request_id: str
    model: str
    created: int

    def whole(self, chunks: list[Chunk], completion: Completion) -> bytes:
        """The body of an answer that is not streamed."""
        text = "".join(chunk.text for chunk in chunks)
        reply = self._frame(is_stream=False) | {
            "choices": [
                self._choice(
                    {"message": {"role": "assistant", "content": text, "refusal": None}}
                    if self.kind is Kind.CHAT
                    else {"text": text},
                    [token_id for chunk in chunks for token_id in chunk.token_ids],
                    completion.finish_reason,
                )
            ],
            "usage": _usage(completion.usage),
            "twophase": _twophase(completion),
        }
        return dumped(reply)

    def opening(self) -> bytes:
        """The event that opens a stream: a chat tells who speaks."""
        if self.kind is Kind.TEXT:
            return b""
        opening: Json = {"delta": {"role": "assistant", "content": ""}}
        return self._event(self._choice(opening, [], None))

    def events(self, delivery: Delivery, num_sent_tokens: int) -> bytes:
        """One event for each chunk of a delivery; the closing chunk ends the stream.

        num_sent_tokens were in the events before.
        """
        num_prompt_tokens, events = delivery.request.num_prompt_tokens, []
        for chunk in delivery.chunks:
            num_sent_tokens += len(chunk.token_ids)
            usage = None
            if self.body.stream_options.continuous_usage_stats:
                usage = _usage(Usage(num_prompt_tokens, num_sent_tokens))
            choice = self._choice(self._piece(chunk), chunk.token_ids, _reason(chunk))
            if chunk.completion is None:
                events.append(self._event(choice, usage))
            else:
                events.append(self._closing(choice, usage, chunk.completion))
        return b"".join(events)

    def _closing(self, choice: Json, usage: Json | None, completion: Completion) -> bytes:
        last = self._event(choice, usage, {"twophase": _twophase(completion)})
        if self.body.stream_options.include_usage:
            frame = self._frame(is_stream=True)
            last += _sse(frame | {"choices": [], "usage": _usage(completion.usage)})
        return last + DONE

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

    def _choice(self, piece: Json, token_ids: object, finish_reason: str | None) -> Json:
        choice = {"index": 0, **piece, "logprobs": None, "finish_reason": finish_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

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
