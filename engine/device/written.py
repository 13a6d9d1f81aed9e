"""Tells that a layer's KV is written, once a card has really written it.

The thread that steps only enqueues kernels and is layers ahead of the card. Whoever were told of a
layer then would have to order its own work behind those kernels, each on its own stream, and would
take the time that the card still computes for the time of its transfer. So a thread waits for the
card and tells afterwards: what was told of may be read by any means, without a stream or an event.

Threads: `when` and `drain` in the one that steps; `wait` and `tell` in one of this object's own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Written:
    """Who waits for which point of a step.

    Invariant: calls of `tell` come in the order of `when`, each after its `wait`, and all of them
    before `drain` returns.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-written")
        self._pending: list[Future[None]] = []

    def when(self, wait: Callable[[], object], tell: Callable[[], None]) -> None:
        """Have `tell` called once `wait` has returned; returns at once."""

        def run() -> None:
            wait()
            tell()

        self._pending.append(self._thread.submit(run))

    def drain(self) -> None:
        """Return when everybody was told; raises what a `wait` or a `tell` raised.

        Contract: called once all that is waited for is done.
        """
        pending, self._pending = self._pending, []
        for told in pending:
            told.result()
