"""How a fault is done to a process of this machine, and undone after a while."""

import asyncio
import logging
import os
import signal

import psutil

from core.settings.chaos import FaultKind

_log = logging.getLogger("twophase.chaos")


async def harm(kind: FaultKind, pid: int, duration_s: float) -> None:
    """Do it to process `pid`; but for a kill it is undone after `duration_s`.

    Contract: undone also when this is cancelled; a process that has ended meanwhile is no error.
    """
    try:
        match kind:
            case FaultKind.KILL:
                os.kill(pid, signal.SIGKILL)
            case FaultKind.PAUSE:
                await _pause(pid, duration_s)
            case FaultKind.MEMORY:
                await _starve(pid, duration_s)
    except (ProcessLookupError, psutil.NoSuchProcess):
        _log.info("process %d has ended by itself", pid)


async def _pause(pid: int, duration_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(duration_s)
    finally:
        os.kill(pid, signal.SIGCONT)


async def _starve(pid: int, duration_s: float) -> None:
    """Its address space must not grow: what asks for more memory gets an error."""
    process = psutil.Process(pid)
    soft, hard = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, hard))
    try:
        await asyncio.sleep(duration_s)
    finally:
        process.rlimit(psutil.RLIMIT_AS, (soft, hard))
