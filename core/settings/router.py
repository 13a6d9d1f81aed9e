"""The `router` section of the YAML: where it listens, what it takes in, how it recovers."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field

from core.settings.section import Seconds, Section


class OnFailure(StrEnum):
    """What happens to a request that a worker failed."""

    RESUME = "resume"
    FAIL = "fail"


class OnDrain(StrEnum):
    """How running answers leave a decode worker that stops."""

    MIGRATE = "migrate"
    RECOMPUTE = "recompute"


class LocalPrefill(StrEnum):
    """Whether a decode worker may read a prompt although a prefill worker could."""

    AUTO = "auto"
    NEVER = "never"


class RouterConfig(Section):
    """The front door."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8100, ge=0, le=65_535)
    """Port of the gRPC endpoint; 0 takes a free one."""
    http_port: int | None = Field(default=8000, ge=0, le=65_535)
    """Port of the OpenAI-compatible HTTP endpoint; 0 takes a free one, null leaves it off."""
    page: bool = True
    """Whether http_port shows the live page at /ui."""
    workers: tuple[str, ...] = ()
    """host:port of workers that were started by hand."""
    max_active_requests: int = Field(default=1024, ge=1)
    """Answers between first and last message; more are refused with RESOURCE_EXHAUSTED."""
    history: int = Field(default=1000, ge=1)
    """Ended answers that `twophase explain` and `diagnose` can tell of."""
    max_n: int = Field(default=16, ge=1, le=128)
    """Answers that one request may ask for."""
    max_message: ByteSize | None = Field(default=None, ge=4096)
    """Most bytes of one gRPC message; default: what a prompt of the checkpoint's context can need,
    at least 4MiB and at most 64MiB."""
    default_deadline_s: Seconds = 600.0
    """For requests that come without a deadline; also the most that one may ask for."""
    worker_timeout_s: Seconds = 15.0
    """A worker that says nothing for this long is lost; a broken connection is noticed at once."""
    wedged_after_s: Seconds = 60.0
    """A worker that answers, but does no step for this long while work waits, is lost, too."""
    warm_s: float = Field(default=10.0, ge=0, le=3600)
    """Longest that a worker which connected waits for the test of its links while others can
    serve; a link that is not there by then is made when it is needed. 0: it serves at once."""
    on_failure: OnFailure = OnFailure.RESUME
    """resume: a request that a worker failed goes on elsewhere, from its last token; without a
    prefill worker, decode workers read prompts. fail: it ends with the worker's error."""
    on_drain: OnDrain = OnDrain.MIGRATE
    """migrate: a decode worker that stops ships the KV caches of running answers to another, where
    there is one; what is not worth it, or fails, is read again there. recompute: all is."""
    max_attempts: int = Field(default=4, ge=1, le=100)
    """Of one request, the first included; with on_failure resume."""
    max_wait_s: Seconds = 5.0
    """Longest wait of a request for a decode worker while none is connected."""
    max_queued_requests: int = Field(default=1024, ge=0)
    """Requests that wait at the router because no worker has room for them; more are refused."""
    max_queue_s: Seconds = 60.0
    """Longest wait of a request for a worker with room."""
    local_prefill: LocalPrefill = LocalPrefill.NEVER
    """auto: a decode worker reads a short prompt itself where that is measured to be sooner; see
    docs/placement.md. never: only where no prefill worker can."""
    local_prefill_tokens: int = Field(default=256, ge=1)
    """With local_prefill auto: most prompt tokens, less what is cached, to be read that way."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """With `twophase up`: Ray resources that the router takes of its node, by which that is chosen;
    an address that clients know needs one."""
    drain_s: Seconds = 30.0
    """Longest wait for running requests when the router, or a worker, is stopping."""
    record: Path | None = None
    """File to which times and lengths of requests are appended, for `twophase what-if`."""
