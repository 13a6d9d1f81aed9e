"""A request's timeline as spans: the request, its phases at the router, prefill, transfer, decode.

Attributes follow OpenTelemetry's conventions for generative AI where there are some; all else is
`twophase.*`. Text of prompts and answers is in none.

Pure.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from core.completion import Completion
from core.events.event import ROUTER, Event, EventKind
from core.request import FinishReason, SamplingParams

Attribute = str | int | float | bool | list[str]

_GROUPS = {
    EventKind.QUEUE: "prefill",
    EventKind.CHUNK: "prefill",
    EventKind.PUSH: "transfer",
    EventKind.TRANSFER: "transfer",
    EventKind.SLOT_WAIT: "decode",
    EventKind.STEPS: "decode",
    EventKind.GAP: "decode",
}
# What its span tells of an event already.
_TOLD = ("kind", "begin_s", "end_s", "where", "note")


@dataclass(frozen=True, slots=True)
class Instant:
    """Something without a length that a span tells of."""

    name: str
    at_s: float
    attributes: dict[str, Attribute]


@dataclass(frozen=True, slots=True)
class Span:
    """One span, on the router's clock. service tells which part of the cluster it is of.

    error is empty where nothing failed.
    """

    name: str
    service: str
    where: str
    begin_s: float
    end_s: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    children: tuple["Span", ...] = ()
    instants: tuple[Instant, ...] = ()
    error: str = ""

    @property
    def num_spans(self) -> int:
        """It and all below it."""
        return 1 + sum(child.num_spans for child in self.children)


def request_span(
    completion: Completion,
    events: Iterable[Event],
    sampling: SamplingParams,
    *,
    model: str,
    operation: str,
) -> Span:
    """The span of a whole request that ended, with all below it."""
    events = list(events)
    lasting = [event for event in events if event.duration_s > 0]
    at_router = [_span(event, ROUTER) for event in lasting if event.kind not in _GROUPS]
    groups: dict[tuple[int, str, str], list[Event]] = {}
    for event in lasting:
        if event.kind in _GROUPS:
            group = event.attempt, _GROUPS[event.kind], event.where
            groups.setdefault(group, []).append(event)
    instants = [event for event in events if event.duration_s == 0]
    is_failed = completion.finish_reason is FinishReason.ERROR
    begin_s = events[0].begin_s
    return Span(
        name=f"{operation} {model}",
        service=ROUTER,
        where=ROUTER,
        begin_s=begin_s,
        end_s=begin_s + completion.phases.total_s,
        attributes=_request_attributes(completion, sampling, model, operation),
        children=(*at_router, *(_group(name, of) for (_, name, _), of in groups.items())),
        instants=tuple(Instant(e.kind.value, e.begin_s, _attributes(e)) for e in instants),
        error="the answer is not complete" if is_failed else "",
    )


def _group(name: str, events: list[Event]) -> Span:
    """What one worker did of a phase."""
    where, service = events[0].where, "decode" if name == "decode" else "prefill"
    return Span(
        name=name,
        service=service,
        where=where,
        begin_s=min(event.begin_s for event in events),
        end_s=max(event.end_s for event in events),
        children=tuple(_span(event, service) for event in events),
    )


def _span(event: Event, service: str) -> Span:
    error = event.note if event.kind is EventKind.FAILED else ""
    name, attributes = event.kind.value, _attributes(event)
    return Span(name, service, event.where, event.begin_s, event.end_s, attributes, error=error)


def _attributes(event: Event) -> dict[str, Attribute]:
    numbers = {name: v for name, v in asdict(event).items() if v and name not in _TOLD}
    told = {f"twophase.{n}": list(v) if n == "request_ids" else v for n, v in numbers.items()}
    return told | ({"twophase.why": event.note} if event.note else {})


def _request_attributes(
    completion: Completion, sampling: SamplingParams, model: str, operation: str
) -> dict[str, Attribute]:
    usage, phases = completion.usage, completion.phases
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "twophase",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.response.id": completion.request_id,
        "gen_ai.response.finish_reasons": [completion.finish_reason.value],
        "gen_ai.response.time_to_first_chunk": phases.time_to_first_token_s,
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_prefill_cached_tokens,
        "twophase.prefill_worker": completion.prefill_worker,
        "twophase.decode_worker": completion.decode_worker,
        **{f"twophase.phase.{name}_s": seconds for name, seconds in phases.items()},
        "twophase.phase.unaccounted_s": phases.unaccounted_s,
    }
