"""A process that serves until it is told to stop: signals, log lines, exit codes.

SIGINT or SIGTERM asks it to stop in order; a second one ends it at once. A TwophaseError ends it
with one line on standard error and exit code 2.
"""

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from core.errors import TwophaseError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
EXIT_REFUSED = 2
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_logging(level: int = logging.INFO) -> None:
    """Log lines to standard error."""
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)


def end_with_parent() -> None:
    """On Linux, have this process killed when the thread that started it ends, even if stopped.

    Contract: a parent that ended before this call is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `serve` with an event that the first SIGINT or SIGTERM sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            # The system's own answer, the end at once: Python's would wait for a running step.
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    await serve(stop)


def exit_code_of(run: Callable[[], None]) -> int:
    """0 after `run`; EXIT_REFUSED, with one line, after a TwophaseError."""
    try:
        run()
    except TwophaseError as error:
        sys.stderr.write(f"twophase: {error}\n")
        return EXIT_REFUSED
    except BaseExceptionGroup as group:
        cause = cause_of(group)
        if cause is group:
            raise
        sys.stderr.write(f"twophase: {cause}\n")
        return EXIT_REFUSED
    return 0


def cause_of(error: BaseException) -> BaseException:
    """The first TwophaseError in a group of errors; what is no such group, itself."""
    known = error.subgroup(TwophaseError) if isinstance(error, BaseExceptionGroup) else None
    if known is None:
        return error
    first: BaseException = known
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
