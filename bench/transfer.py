"""How fast each transfer backend moves KV blocks, beside memcpy and a bare gloo loop.

`python -m bench.transfer` starts one sender process and measures, in turns, whole handoffs as
the workers make them: gather, checksum, transport, scatter and check of every piece, with a pipe
in the place of the gRPC stream. Time runs from the order to send until the last piece is
checked. memcpy copies the same bytes once from one warm buffer to another in this process; the
bare gloo loop moves them in pieces of the same size with all receives posted ahead, and neither
gathers, checks nor scatters. "shm write" is the prefill side alone: pages copied in place and
their checksum, without the decode side's check. Medians over the rounds; the first round warms
up and is dropped.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from bench.report import Row, print_report
from core.layout import Dtype, KVLayout
from core.link import PieceId, Span
from kv_transfer.backend import Offer, Receiver, ReceiverBackend, Sender
from kv_transfer.connection import connect
from kv_transfer.plan import plan_spans, span_bytes
from kv_transfer.shm import ShmBackend
from kv_transfer.torch_backend import NUM_SLOTS, SLOT_BYTES, TorchBackend
from kv_transfer.torch_pair import DECODE, PREFILL, LinkSpec, build_pair

SMOLLM2 = KVLayout("bench", Dtype.FLOAT32, 16, 30, 3, 64)
# One block over its 8 layers is 64 KiB.
POWERS_OF_TWO = KVLayout("bench", Dtype.FLOAT32, 16, 8, 1, 64)
SIZES_KIB = (64, 512, 4096, 65536)
PROMPTS_TOKENS = (128, 512, 2048, 8000)
HOST = "127.0.0.1"
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One amount of KV cache: blocks in rising runs, or scattered over the cache."""

    name: str
    layout: KVLayout
    num_blocks: int
    is_scattered: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that one handoff moves."""
        return self.num_blocks * self.layout.block_bytes

    def spans(self) -> tuple[Span, ...]:
        """The pieces of the handoff."""
        return plan_spans(
            self.layout,
            layers=range(self.layout.num_layers),
            blocks=range(self.num_blocks),
            max_bytes=SLOT_BYTES,
        )

    def block_ids(self, seed: int) -> list[int]:
        """Cache blocks of the handoff at one end."""
        if not self.is_scattered:
            return list(range(self.num_blocks))
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_blocks, generator=generator).tolist()


def cases() -> list[Case]:
    """Sizes in powers of two, then prompts of SmolLM2-135M in float32."""
    sizes = [Case(f"{kib} KiB", POWERS_OF_TWO, kib // 64) for kib in SIZES_KIB]
    prompts = [
        Case(f"{tokens} tokens", SMOLLM2, SMOLLM2.num_blocks(tokens)) for tokens in PROMPTS_TOKENS
    ]
    return [*sizes, *prompts, Case("512 tokens, scattered", SMOLLM2, 32, is_scattered=True)]


def new_cache(layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """A float32 cache whose pages are all present."""
    return torch.ones(cache_shape(layout, num_blocks))


def cache_shape(layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    """(L, 2, N, S, K, D)."""
    heads = (layout.num_kv_heads, layout.head_dim)
    return (layout.num_layers, 2, num_blocks, layout.block_size, *heads)


def serve_sender(pipe: Connection) -> None:
    """The prefill process: connects when told, pushes whole handoffs when told."""
    torch.set_num_threads(1)
    links: dict[str, Sender] = {}
    group: Any = None
    while (order := pipe.recv()) is not None:
        name, *arguments = order
        if name == "connect":
            kind, offer, layout, num_blocks = arguments
            links[kind] = connect(offer, new_cache(layout, num_blocks), TIMEOUT_S)
        elif name == "connect_bare":
            (spec,) = arguments
            group = build_pair(spec, PREFILL, timedelta(seconds=TIMEOUT_S), TIMEOUT_S)
        elif name == "push":
            push(links[arguments[0]], arguments[1], pipe)
        elif name == "write":
            pipe.send(write(links["shm"], arguments[0]))
        elif name == "push_bare":
            payload = torch.ones(SLOT_BYTES, dtype=torch.uint8)
            works = [group.send([payload[:size]], DECODE, 0) for size in arguments[0]]
            pipe.recv()
            works.clear()
        elif name == "close":
            for link in links.values():
                link.close()
            links.clear()
            group = None
            pipe.send("closed")


def push(link: Sender, case: Case, pipe: Connection) -> None:
    """One handoff from the prefill side, with as many pieces under way as the link has room."""
    source, target = case.block_ids(seed=1), case.block_ids(seed=2)
    spans = case.spans()
    num_acknowledged = 0
    for index, span in enumerate(spans):
        while not link.has_room() or pipe.poll():
            link.acknowledge(PieceId(0, pipe.recv()))
            num_acknowledged += 1
        blocks = slice(span.blocks.start, span.blocks.stop)
        pipe.send(link.send(PieceId(0, index), span, source[blocks], target[blocks]))
    while num_acknowledged < len(spans):
        link.acknowledge(PieceId(0, pipe.recv()))
        num_acknowledged += 1


def write(link: Sender, case: Case) -> float:
    """Seconds of the sends of one handoff over a one-sided link, which needs no receiver."""
    source, target = case.block_ids(seed=1), case.block_ids(seed=2)
    started_s = time.perf_counter()
    for index, span in enumerate(case.spans()):
        blocks = slice(span.blocks.start, span.blocks.stop)
        link.send(PieceId(0, index), span, source[blocks], target[blocks])
    return time.perf_counter() - started_s


def take(receiver: Receiver, kind: str, case: Case, pipe: Connection) -> float:
    """Seconds of one handoff, measured at the decode side."""
    target = case.block_ids(seed=2)
    started_s = time.perf_counter()
    pipe.send(("push", kind, case))
    for index, span in enumerate(case.spans()):
        checksum = pipe.recv()
        blocks = slice(span.blocks.start, span.blocks.stop)
        if receiver.take(span, target[blocks]) != checksum:
            raise RuntimeError(f"{kind} delivered other bytes than it was given")
        if index + 1 == len(case.spans()):
            elapsed_s = time.perf_counter() - started_s
        pipe.send(index)
    return elapsed_s


class Bench:
    """Both ends of all links for caches of one layout."""

    def __init__(self, layout: KVLayout, num_blocks: int, pipe: Connection) -> None:
        self._pipe = pipe
        self._buffers = [new_cache(layout, num_blocks).view(-1) for _ in range(2)]
        self._backends: list[ReceiverBackend] = [
            ShmBackend(),
            TorchBackend(host=HOST, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS),
        ]
        self._receivers: dict[str, Receiver] = {}
        for backend in self._backends:
            storage = backend.allocate(num_blocks * layout.block_bytes)
            cache = storage.view(torch.float32).view(cache_shape(layout, num_blocks))
            offer, receiver = backend.offer(f"bench-{backend.kind}", cache)
            self._link(backend.kind, offer, receiver, layout, num_blocks)
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        spec = LinkSpec(HOST, self._store.port, "bare", "cpu", 1, 1)
        pipe.send(("connect_bare", spec))
        self._group = build_pair(spec, DECODE, timedelta(seconds=TIMEOUT_S), TIMEOUT_S)

    def measure(self, case: Case, num_rounds: int) -> dict[str, float]:
        """Median seconds by name, all contenders in turns."""
        contenders: dict[str, Callable[[], float]] = {
            "memcpy": lambda: self._copy(case),
            "gloo": lambda: self._take_bare(case),
            "shm write": lambda: self._write(case),
        }
        for kind, receiver in self._receivers.items():
            contenders[kind] = partial(take, receiver, kind, case, self._pipe)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(num_rounds + 1):
            for name, contender in contenders.items():
                seconds[name].append(contender())
        return {name: statistics.median(values[1:]) for name, values in seconds.items()}

    def close(self) -> None:
        """End all links at both ends."""
        self._pipe.send(("close",))
        self._pipe.recv()
        for backend in self._backends:
            backend.close()

    def _link(
        self, kind: str, offer: Offer, receiver: Receiver, layout: KVLayout, num_blocks: int
    ) -> None:
        self._pipe.send(("connect", kind, offer, layout, num_blocks))
        receiver.accept(TIMEOUT_S)
        self._receivers[kind] = receiver

    def _copy(self, case: Case) -> float:
        source, target = (buffer[: case.num_bytes // 4] for buffer in self._buffers)
        started_s = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started_s

    def _write(self, case: Case) -> float:
        self._pipe.send(("write", case))
        seconds = self._pipe.recv()
        assert isinstance(seconds, float)
        return seconds

    def _take_bare(self, case: Case) -> float:
        sizes = [span_bytes(case.layout, span) for span in case.spans()]
        target = self._buffers[0].view(torch.uint8)
        parts, offset = [], 0
        for size in sizes:
            parts.append(target[offset : offset + size])
            offset += size
        started_s = time.perf_counter()
        works = [self._group.recv([part], PREFILL, 0) for part in parts]
        self._pipe.send(("push_bare", sizes))
        for work in works:
            work.wait()
        elapsed_s = time.perf_counter() - started_s
        self._pipe.send("received")
        return elapsed_s


def rows_of(case: Case, seconds: dict[str, float]) -> list[Row]:
    """GB/s of each backend beside its peers."""
    speed = {name: case.num_bytes / value / 1e9 for name, value in seconds.items()}
    return [
        Row(f"{case.name}, {kind}", speed[kind], "GB/s", peer, speed[peer])
        for kind, peer in (
            ("shm write", "memcpy"),
            ("shm", "memcpy"),
            ("torch", "gloo"),
            ("torch", "memcpy"),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases and print the report."""
    parser = argparse.ArgumentParser(prog="bench.transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case (median)")
    num_rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    sender = context.Process(target=serve_sender, args=(theirs,), daemon=True)
    sender.start()
    rows: list[Row] = []
    for layout in (POWERS_OF_TWO, SMOLLM2):
        layout_cases = [case for case in cases() if case.layout is layout]
        bench = Bench(layout, max(case.num_blocks for case in layout_cases), pipe)
        for case in layout_cases:
            rows += rows_of(case, bench.measure(case, num_rounds))
        bench.close()
    pipe.send(None)
    sender.join()
    print_report("KV transfer: whole handoffs, one sender and one receiver process", rows)


if __name__ == "__main__":
    main()
