"""Two processes, a core each, that hand KV caches over by every backend: what the speeds are.

A contender is measured as the workers use it: all pieces of a handoff, each gathered, hashed, sent,
taken and checked; a pipe stands for the gRPC stream. Time runs at the decode side, from the order
to send until the last piece is checked. Its peers run in the same rounds: "memcpy" copies the same
bytes once within one process, "gloo" sends them from cache-sized memory into cache-sized memory in
pieces of BARE_PIECE_BYTES, all receives posted ahead, without gathering, hashing or scattering.
"""

import ctypes
import multiprocessing
import os
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from core.config import TransferConfig
from core.layout import Dtype, KVLayout
from core.link import PieceId, Span
from kv_transfer.backend import Offer, Receiver, ReceiverBackend, Sender
from kv_transfer.connection import connect
from kv_transfer.pages import HostPages
from kv_transfer.plan import plan_spans
from kv_transfer.torch_pair import DECODE, PREFILL, LinkSpec, build_pair

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
BARE_PIECE_BYTES = 4 << 20
# Small handoffs take many rounds: a median needs them, and they cost nothing.
ROUND_BYTES = 512 << 20
MIN_ROUNDS, MAX_ROUNDS = 7, 41

_WORD = struct.Struct("<Q")


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

    def pieces(self, max_piece_bytes: int) -> list["Piece"]:
        """The handoff as a worker with default settings plans it."""
        source, target = self._block_ids(seed=1), self._block_ids(seed=2)
        spans = plan_spans(
            self.layout,
            layers=range(self.layout.num_layers),
            blocks=range(self.num_blocks),
            max_bytes=min(max_piece_bytes, TransferConfig().piece),
        )
        cuts = [slice(span.blocks.start, span.blocks.stop) for span in spans]
        return [
            Piece(span, source[cut], target[cut]) for span, cut in zip(spans, cuts, strict=True)
        ]

    def _block_ids(self, seed: int) -> list[int]:
        """Cache blocks of the handoff at one end."""
        if not self.is_scattered:
            return list(range(self.num_blocks))
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_blocks, generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Piece:
    """What `send` and `take` are called with."""

    span: Span
    source: list[int]
    target: list[int]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What cache both ends of a link have."""

    layout: KVLayout
    num_blocks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2, N, S, K, D)."""
        layout = self.layout
        heads = (layout.num_kv_heads, layout.head_dim)
        return (layout.num_layers, 2, self.num_blocks, layout.block_size, *heads)

    def new_cache(self) -> torch.Tensor:
        """A float32 cache whose pages are all present."""
        assert self.layout.dtype is Dtype.FLOAT32
        return torch.ones(self.shape)


@dataclass(slots=True)
class _Prefill:
    """The sender's process."""

    pipe: Connection
    links: dict[str, Sender] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    bare: Any = None  # a process group, as torch_pair makes it
    cache: torch.Tensor | None = None

    def connect(self, kind: str, offer: Offer, size: CacheSize) -> None:
        """Build this end of a link, all from one cache."""
        if self.cache is None:
            self.cache = size.new_cache()
        self.links[kind] = connect(offer, self.cache, TIMEOUT_S)
        self.pipe.send(self.links[kind].max_piece_bytes)

    def connect_bare(self, spec: LinkSpec) -> None:
        """Build this end of the bare loop's pair."""
        self.bare = build_pair(spec, PREFILL, TIMEOUT_S)

    def prepare(self, kind: str, case: Case) -> None:
        """Plan the handoff that `push` makes."""
        self.pieces = case.pieces(self.links[kind].max_piece_bytes)
        _say(self.pipe, len(self.pieces))

    def push(self, kind: str) -> None:
        """One handoff, with as many pieces under way as the link has room."""
        link, num_acknowledged = self.links[kind], 0
        for index, piece in enumerate(self.pieces):
            while not link.has_room():
                link.acknowledge(PieceId(0, _hear(self.pipe)))
                num_acknowledged += 1
            _say(self.pipe, link.send(PieceId(0, index), piece.span, piece.source, piece.target))
        for _ in range(len(self.pieces) - num_acknowledged):
            link.acknowledge(PieceId(0, _hear(self.pipe)))

    def push_bare(self, num_bytes: int) -> None:
        """The same bytes by a loop over the group's send."""
        assert self.cache is not None
        payload = self.cache.view(-1).view(torch.uint8)[:num_bytes]
        works = [self.bare.send([part], DECODE, 0) for part in _bare_parts(payload)]
        _hear(self.pipe)
        works.clear()

    def close(self) -> None:
        """End all links."""
        for link in self.links.values():
            link.close()
        self.links.clear()
        self.bare = self.cache = None
        self.pipe.send("closed")


def serve_prefill(pipe: Connection, core: int) -> None:
    """Do as the pipe says until it says None."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    prefill = _Prefill(pipe)
    while (order := pipe.recv()) is not None:
        name, *arguments = order
        getattr(prefill, name)(*arguments)


class Pair:
    """The decode side, in this process, and its prefill process; use as a context manager."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._cores = cores
        os.sched_setaffinity(0, {cores[0]})
        torch.set_num_threads(1)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, cores[-1])
        self._process = context.Process(target=serve_prefill, args=arguments, daemon=True)
        self._process.start()

    def __enter__(self) -> "Pair":
        """The running pair."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the prefill process; this one may run on all its cores again."""
        self.pipe.send(None)
        self._process.join()
        os.sched_setaffinity(0, self._cores)


class Links:
    """Both ends of a link by each backend, for caches of one size; use as a context manager."""

    def __init__(self, pair: Pair, size: CacheSize, backends: Sequence[ReceiverBackend]) -> None:
        self._pipe = pair.pipe
        self._backends = backends
        self._buffers = [size.new_cache().view(-1).view(torch.uint8) for _ in range(2)]
        self._pages = HostPages(size.new_cache())
        self._receivers: dict[str, tuple[Receiver, int]] = {}
        for backend in backends:
            storage = backend.allocate(size.num_blocks * size.layout.block_bytes)
            cache = storage.view(torch.float32).view(size.shape)
            offer, receiver = backend.offer(f"bench-{backend.kind}", cache)
            self._pipe.send(("connect", backend.kind, offer, size))
            receiver.accept(TIMEOUT_S)
            self._receivers[backend.kind] = receiver, self._pipe.recv()
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        spec = LinkSpec(HOST, self._store.port, "bare", "cpu", 1, 1)
        self._pipe.send(("connect_bare", spec))
        self._bare = build_pair(spec, DECODE, TIMEOUT_S)

    def __enter__(self) -> "Links":
        """The links."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close them at both ends."""
        self._pipe.send(("close",))
        self._pipe.recv()
        for backend in self._backends:
            backend.close()

    def measure(self, case: Case) -> dict[str, float]:
        """Median seconds by name: the backends, "memcpy", "gloo" and "checksum", in turns.

        "checksum" hashes the bytes once, in one process, where they lie.
        """
        contenders: dict[str, Callable[[], float]] = {
            "memcpy": partial(self._copy, case.num_bytes),
            "gloo": partial(self._take_bare, case.num_bytes),
            "checksum": partial(self._hash, case),
        }
        for kind, (receiver, max_piece_bytes) in self._receivers.items():
            contenders[kind] = partial(self._take, kind, receiver, case, max_piece_bytes)
        num_rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, ROUND_BYTES // case.num_bytes))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(num_rounds + 1):
            for name, contender in contenders.items():
                seconds[name].append(contender())
        return {name: statistics.median(values[1:]) for name, values in seconds.items()}

    def _take(self, kind: str, receiver: Receiver, case: Case, max_piece_bytes: int) -> float:
        pieces = case.pieces(max_piece_bytes)
        self._pipe.send(("prepare", kind, case))
        assert _hear(self._pipe) == len(pieces)
        started_s = ended_s = time.perf_counter()
        self._pipe.send(("push", kind))
        for index, piece in enumerate(pieces):
            checksum = _hear(self._pipe)
            if receiver.take(piece.span, piece.target) != checksum:
                raise RuntimeError(f"{kind} delivered other bytes than it was given")
            ended_s = time.perf_counter()
            _say(self._pipe, index)
        return ended_s - started_s

    def _copy(self, num_bytes: int) -> float:
        source, target = self._buffers
        started_s = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        return time.perf_counter() - started_s

    def _hash(self, case: Case) -> float:
        pieces = case.pieces(BARE_PIECE_BYTES)
        started_s = time.perf_counter()
        for piece in pieces:
            self._pages.checksum(piece.span, piece.source)
        return time.perf_counter() - started_s

    def _take_bare(self, num_bytes: int) -> float:
        parts = _bare_parts(self._buffers[0][:num_bytes])
        started_s = time.perf_counter()
        works = [self._bare.recv([part], PREFILL, 0) for part in parts]
        self._pipe.send(("push_bare", num_bytes))
        for work in works:
            work.wait()
        elapsed_s = time.perf_counter() - started_s
        _say(self._pipe, 0)
        return elapsed_s


def _bare_parts(data: torch.Tensor) -> list[torch.Tensor]:
    starts = range(0, data.numel(), BARE_PIECE_BYTES)
    return [data[start : start + BARE_PIECE_BYTES] for start in starts]


def _say(pipe: Connection, word: int) -> None:
    pipe.send_bytes(_WORD.pack(word))


def _hear(pipe: Connection) -> int:
    (word,) = _WORD.unpack(pipe.recv_bytes())
    return int(word)
