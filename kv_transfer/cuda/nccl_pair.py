"""A process group of two ranks over NCCL, from its building to its abort.

Traps that shaped this file (read in the sources of torch 2.13 and NCCL 2.27, not run):

- NCCL meets its peer in the first calls of a communicator, on the calling thread and without a
  deadline: a sender whose first send comes before the receiver has heard of a piece would wait for
  ever. So both ends exchange a byte while the pair is built, in a thread that may be given up.
- Unless TORCH_NCCL_BLOCKING_WAIT is set, each group has a watchdog that ends the whole process
  when a send is not received in time. A dead peer must end its link and nothing else. torch takes
  that from the environment alone, when a group is made: `forbid_watchdog`.
- `wait` sleeps a millisecond or more at a time in that mode; `is_completed` does not, and after it
  `wait` only orders the streams, or raises what went wrong.
- A transfer that has started ends with its peer or with `abort`, which frees memory of the card and
  may wait for what computes there: it gets a thread of its own.
- torch deals out 32 streams of each priority in turn. A receive keeps its stream until the peer
  sends: groups take streams of high priority, so that steps and lanes never share one with them.
- NCCL takes a bounded number of thread blocks (`MAX_CTAS`) and as many channels from each of both
  cards. Every pair of workers has a group, and its blocks spin while they wait for the peer.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from core.errors import PeerLost
from kv_transfer.patience import is_done_within
from kv_transfer.torch_pair import DECODE, PREFILL, LinkSpec

MAX_CTAS = 4
ABORT_TIMEOUT_S = 10.0

_TAG = 0  # NCCL has none

LOG = logging.getLogger(__name__)

# ProcessGroupNCCL is absent from a torch without CUDA: groups are untyped here.
OpenGroup = Callable[[Store, int], Any]


def forbid_watchdog() -> None:
    """Have NCCL groups that are made from now on leave it to their waits to find a dead peer.

    For workers of one rank: the sums of several ranks would wait in milliseconds.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"


def open_nccl(store: Store, rank: int) -> Any:
    """One end of a group that talks to nobody yet."""
    forbid_watchdog()
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=ABORT_TIMEOUT_S)
    options.config.min_ctas = 1
    options.config.max_ctas = MAX_CTAS
    return nccl(store, rank, 2, options)


class Pair:
    """One end of a built pair. One thread sends or receives; `abort` may come from any."""

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self._name = name

    def send(self, data: torch.Tensor) -> Any:
        """Start to send to decode; the work, which has to be kept until it was received.

        Raises:
            RuntimeError: the group failed.
        """
        return self._group.send([data], DECODE, _TAG)

    def receive(self, data: torch.Tensor, timeout_s: float) -> None:
        """Receive exactly as many bytes as `data` has, which the current stream then sees.

        Raises:
            RuntimeError: the group failed.
            TimeoutError: they did not come in `timeout_s`.
        """
        _finish(self._group.recv([data], PREFILL, _TAG), timeout_s)

    def abort(self, *buffers: torch.Tensor) -> None:
        """End all transfers; `buffers` are kept until none of them is touched any more.

        Contract: called once; returns at once.
        """
        threading.Thread(
            target=_abort, args=(self._group, self._name, buffers), name="nccl-abort", daemon=True
        ).start()


def build_pair(
    spec: LinkSpec, rank: int, device: torch.device, timeout_s: float, open_group: OpenGroup
) -> Pair:
    """One end of the pair that `spec` names, when both ends have talked to each other.

    Raises:
        PeerLost: they did not within `timeout_s`.
    """
    until_s = time.monotonic() + timeout_s
    timeout = timedelta(seconds=timeout_s)
    try:
        client = TCPStore(spec.host, spec.port, is_master=False, timeout=timeout)
        store = PrefixStore(spec.prefix, client)
        # Before NCCL waits for the other end without a deadline: it is there.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{1 - rank}"], timeout)
        group = _built(lambda: _talking_group(store, rank, device, timeout_s, open_group), until_s)
    except (RuntimeError, OSError) as error:
        why = str(error).split("\n", maxsplit=1)[0]
        raise PeerLost(spec.prefix, f"no pair was built within {timeout_s} s: {why}") from error
    return Pair(group, spec.prefix)


def _talking_group(
    store: Store, rank: int, device: torch.device, timeout_s: float, open_group: OpenGroup
) -> Any:
    group = open_group(store, rank)
    word = torch.ones(1, dtype=torch.uint8, device=device)
    is_sender = rank == PREFILL
    work = group.send([word], DECODE, _TAG) if is_sender else group.recv([word], PREFILL, _TAG)
    try:
        _finish(work, timeout_s)
    except (RuntimeError, TimeoutError):
        _abort(group, "a pair", (word,))
        raise
    return group


def _built(build: Callable[[], Any], until_s: float) -> Any:
    """What `build` returns in a thread of its own; one that comes too late is aborted there.

    Raises:
        TimeoutError: it did not return until `until_s`.
    """
    built: Future[Any] = Future()

    def run() -> None:
        try:
            group = build()
        except Exception as error:  # root of the thread: whoever waits gets it
            if built.set_running_or_notify_cancel():
                built.set_exception(error)
            return
        if built.set_running_or_notify_cancel():
            built.set_result(group)
        else:
            _abort(group, "a pair", ())

    threading.Thread(target=run, name="nccl-build", daemon=True).start()
    try:
        return built.result(until_s - time.monotonic())
    except TimeoutError:
        if built.cancel():
            raise
        return built.result()


def _finish(work: Any, timeout_s: float) -> None:
    if not is_done_within(work.is_completed, timeout_s):
        raise TimeoutError(f"the other end is silent for {timeout_s} s")
    work.wait()


def _abort(group: Any, name: str, buffers: tuple[torch.Tensor, ...]) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        LOG.warning("the group of link %s, with %d buffers: %s", name, len(buffers), error)
