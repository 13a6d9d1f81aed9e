"""A link's own stream on each card that it touches.

On one stream for all, a link that waits for a peer would hold up every other link, and on the one
that a step computes on, the step. So all work of a link is started inside `working`, on streams of
the link alone, on the cards where its caches lie whatever card the thread had before.

What the stream reads was written before the link was told of it: layers by `engine.device.written`,
pieces because `take` and `send` return only when their stream is done. So streams never wait for
each other, except for what the same thread has started before. torch deals out 32 streams in turn:
those who share one wait for each other's copies, never for a peer. On a CPU a lane does nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from kv_transfer.patience import is_done_within


class Lane:
    """The streams of one end of a link; used by one thread at a time."""

    def __init__(self, *devices: torch.device) -> None:
        cards = dict.fromkeys(device for device in devices if device.type == "cuda")
        self._streams = [torch.cuda.Stream(card) for card in cards]  # type: ignore[no-untyped-call]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Start work of the link inside; the first device is the current one."""
        with ExitStack() as stack:
            for stream in reversed(self._streams):
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def is_idle(self) -> bool:
        """True if all that was started is done. Contract: thread-safe; never blocks."""
        return all(stream.query() for stream in self._streams)

    def is_idle_within(self, timeout_s: float) -> bool:
        """Wait until it `is_idle`, at most `timeout_s`; whether it is."""
        return is_done_within(self.is_idle, timeout_s)
