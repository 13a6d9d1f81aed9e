"""What may be done with a request, and for how long; cut out of RouterConfig, which explains it."""

from dataclasses import dataclass

from core.config import Mode
from core.settings.router import OnFailure


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    """How requests wait and are placed, and what is tried when a worker fails one."""

    mode: Mode
    may_convert_dtype: bool = False
    on_failure: OnFailure = OnFailure.RESUME
    max_attempts: int = 4
    max_wait_s: float = 5.0
    max_queued_requests: int = 1024
    max_queue_s: float = 60.0
    max_local_tokens: int = 0
