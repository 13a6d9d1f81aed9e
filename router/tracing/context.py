"""The trace that a request belongs to, as W3C Trace Context tells it (traceparent, tracestate).

Pure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
# Longer ones may be left out (W3C Trace Context, s.3.3.1.5).
MAX_STATE = 512

# Version 00; of later ones, what they have in common with it.
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace; parent_span_id is empty where the request begins it. Ids are lower-case hex."""

    trace_id: str
    parent_span_id: str
    is_sampled: bool
    state: str = ""


def trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """What the headers tell; None without a valid traceparent, as the standard asks for."""
    found = _PARENT.fullmatch(headers.get(TRACEPARENT, "").strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_known = version == "00" and more is None
    if not is_known and (version in ("00", "ff")):
        return None
    if int(trace_id, 16) == 0 or int(span_id, 16) == 0:
        return None
    state = headers.get(TRACESTATE, "")
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id, span_id, is_sampled, state if len(state) <= MAX_STATE else "")
