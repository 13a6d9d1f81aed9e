"""A request as its protocol's service unpacked it."""

from dataclasses import dataclass

from core.completion import ChatMessage
from core.request import RequestId, Sender, log_name
from core.sampling import Sampling
from router.request import Defaults, Prompt
from router.tracing.context import TraceContext


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came, unpacked and not yet checked.

    received_s is the router's clock; time_limit_s counts from there, None takes the router's
    default. model is empty for the one that is served. sender is what the request says itself, mark
    as in Request.
    resumed_token_ids are those of its answer that the client has from another router; None for a
    new answer.
    """

    request_id: RequestId
    model: str
    prompt: Prompt
    asked: Sampling
    received_s: float
    time_limit_s: float | None = None
    defaults: Defaults = Defaults()
    sender: Sender = Sender()
    mark: str = ""
    resumed_token_ids: tuple[int, ...] | None = None
    trace: TraceContext | None = None

    @property
    def operation(self) -> str:
        """What is asked for, in OpenTelemetry's word."""
        is_chat = isinstance(self.prompt, list) and isinstance(
            next(iter(self.prompt), None), ChatMessage
        )
        return "chat" if is_chat else "text_completion"

    @property
    def log_name(self) -> str:
        """As Request.log_name."""
        return log_name(self.request_id, self.trace_id)

    @property
    def trace_id(self) -> str:
        """Empty where it is of no trace."""
        return "" if self.trace is None else self.trace.trace_id
