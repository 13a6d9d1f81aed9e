"""What one decode worker takes, and the refusal of what it does not.

Pure: facts in; InvalidRequest with field, value and limit out, or Overloaded.
"""

from dataclasses import dataclass

from core.errors import InvalidRequest, Overloaded
from core.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one decode worker."""

    max_context_tokens: int
    max_waiting_requests: int

    def check(self, request: Request, num_cache_tokens: int, num_waiting: int) -> None:
        """Refuse a request that is too long for context or cache, or that comes after too many."""
        limit = min(self.max_context_tokens, num_cache_tokens)
        if request.max_num_tokens > limit:
            raise InvalidRequest(
                "max_tokens",
                request.sampling.max_tokens,
                f"with a prompt of {request.num_prompt_tokens} tokens the answer may have "
                f"{max(limit - request.num_prompt_tokens, 0)}: this worker holds {limit} tokens",
            )
        if num_waiting >= self.max_waiting_requests:
            raise Overloaded(f"{num_waiting} requests wait for KV blocks")
