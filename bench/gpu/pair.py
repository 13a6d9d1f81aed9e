"""Two processes on one card: `check`'s handoff and interference.

The second process is the prefill worker's end, without its server: it pushes KV blocks over a link
of `kv_transfer`, or computes a long prompt, when it is told to. A pipe takes the place of the
control stream. Every wait for it has a deadline.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from bench.gpu.setup import Findings, Setup
from bench.gpu.speed import GREEDY, decode_steps
from core.errors import TwophaseError
from core.layout import Dtype, KVLayout
from core.link import PieceId, Span
from engine.batch import SequenceStep
from engine.kv_cache import KVCache
from engine.runner import Runner
from kv_transfer.backend import (
    BackendKind,
    Offer,
    Receiver,
    ReceiverBackend,
    Sender,
    choose_backend,
)
from kv_transfer.connection import connect, local_endpoint, open_backend
from kv_transfer.cuda import ipc, nccl
from kv_transfer.cuda.double import SharedMemoryDouble, open_group_double
from kv_transfer.nixl import agent as nixl_agent
from kv_transfer.plan import plan_spans
from kv_transfer.torch_backend import TorchBackend

HOST = "127.0.0.1"
ANSWER_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S = 30.0, 120.0, 5.0
FLOOR_HANDOFF = 0.6
NUM_STREAMS, NUM_QUIET_STEPS = 8, 40
PREFILL_CACHE_BYTES = 4 << 30


class NoAnswer(Exception):  # noqa: N818 - what was not measured is a note, not a failure
    """The second process failed, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way from a cache on this card to one of another process, on this card or the next."""

    kind: BackendKind
    is_to_next_card: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.kind} from the next card" if self.is_to_next_card else f"{self.kind}"


def measure_handoff(setup: Setup, findings: Findings, device: torch.device) -> None:
    """Bytes per second from one process to the other, beside a copy of them on the card."""
    layout = _layout(setup)
    num_blocks = layout.num_blocks(setup.handoff_tokens)
    cache = KVCache(layout, num_blocks, device=device).kv_L2NSKD
    target = torch.empty_like(cache)
    copied_per_s = cache.nbytes / setup.seconds(lambda: target.copy_(cache))
    for way in _ways(setup, cache):
        try:
            seconds = _handoff_seconds(setup, way, device)
        except (NoAnswer, TwophaseError, RuntimeError) as error:
            findings.notes.append(f"handoff over {way.name}: {str(error).splitlines()[0]}")
            continue
        name = f"handoff of {setup.handoff_tokens} tokens over {way.name}"
        rate = cache.nbytes / seconds
        findings.add(name, rate / 1e9, "GB/s", "device copy", copied_per_s / 1e9)
        findings.add(f"{name}: share", rate / copied_per_s, "of copy", "floor", FLOOR_HANDOFF)


def _ways(setup: Setup, cache: torch.Tensor) -> tuple[Way, ...]:
    """What auto takes on one card, then all else that can be tried here; NCCL needs two cards."""
    if setup.is_dry:
        return (Way(BackendKind.IPC), Way(BackendKind.TORCH))
    here = local_endpoint(cache)
    ways = [Way(choose_backend("auto", prefill=here, decode=here).kind)]
    if nixl_agent.is_installed():
        ways.append(Way(BackendKind.NIXL))
    if torch.cuda.device_count() > 1:
        ways += [Way(BackendKind.TORCH, True)]
        if torch.cuda.can_device_access_peer(1, 0):
            ways += [Way(BackendKind.IPC, True)]
    return tuple(dict.fromkeys(ways))


def _backend(setup: Setup, kind: BackendKind) -> ReceiverBackend:
    """Decode's side of a way; its double in a dry run."""
    if not setup.is_dry:
        return open_backend(kind, host=HOST)
    if kind is BackendKind.IPC:
        return ipc.IpcBackend(host=HOST, memory=SharedMemoryDouble())
    return TorchBackend(host=HOST, open_group=open_group_double)


def _connect(setup: Setup, offer: Offer, cache: torch.Tensor) -> Sender:
    """Prefill's side of `_backend`."""
    if not setup.is_dry:
        return connect(offer, cache, START_TIMEOUT_S)
    if offer.kind == BackendKind.IPC:
        return ipc.connect(offer, cache, START_TIMEOUT_S, memory=SharedMemoryDouble())
    return nccl.connect(offer, cache, START_TIMEOUT_S, open_group_double)


def measure_interference(setup: Setup, findings: Findings, runner: Runner) -> None:
    """Gaps between the tokens of running streams while a long prompt is read, here or beside."""
    step = _long_prompt(runner, setup.long_prompt_tokens)
    quiet_s = [_stream(setup, runner, i) for i in range(NUM_QUIET_STEPS)]
    alone_s = setup.seconds(lambda: runner.step([step]), repeats=1)
    _stream(setup, runner, 0)
    before_s = time.perf_counter()
    runner.step([step])
    _stream(setup, runner, 1)
    colocated_s = time.perf_counter() - before_s
    with _second(setup) as pipe:
        _ask(pipe, "load", timeout_s=START_TIMEOUT_S)
        pipe.send(("prefill",))
        ends_s = time.perf_counter() + ANSWER_TIMEOUT_S
        beside_s: list[float] = []
        while not pipe.poll() and time.perf_counter() < ends_s:
            beside_s.append(_stream(setup, runner, len(beside_s)))
        meanwhile_s = _answer(pipe, ANSWER_TIMEOUT_S)
    assert isinstance(meanwhile_s, float)
    quiet_ms = 1e3 * statistics.median(quiet_s)
    findings.add(f"gap of {NUM_STREAMS} streams, quiet", quiet_ms, "ms")
    name = f"longest gap, {setup.long_prompt_tokens} tokens are read"
    findings.add(f"{name} in one process", 1e3 * colocated_s, "ms", "quiet", quiet_ms)
    findings.add(f"{name} in another", 1e3 * max(beside_s, default=0.0), "ms", "quiet", quiet_ms)
    findings.add("that prompt beside the streams", meanwhile_s, "s", "alone", alone_s)


def serve(setup: Setup, pipe: Connection) -> None:
    """The second process: do what the pipe says until it says None."""
    torch.set_num_threads(1)
    link: Sender | None = None
    runner: Runner | None = None
    while (order := pipe.recv()) is not None:
        try:
            match order:
                case ("load",):
                    cache_bytes = min(setup.kv_cache_bytes, PREFILL_CACHE_BYTES)
                    runner = setup.runner(
                        setup.open(), max_decode_sequences=0, kv_cache_bytes=cache_bytes
                    )
                    answer: object = None
                case ("prefill",):
                    assert runner is not None
                    steps = [_long_prompt(runner, setup.long_prompt_tokens)]
                    answer = runner.step(steps).compute_s
                case ("connect", Offer() as offer, int() as card):
                    link = _connected(setup, offer, card)
                    answer = link.max_piece_bytes
                case ("push", *spans):
                    assert link is not None
                    _push(link, spans, pipe)
                    answer = None
        except (TwophaseError, RuntimeError) as error:
            pipe.send(NoAnswer(str(error).splitlines()[0]))
        else:
            pipe.send(answer)


def _handoff_seconds(setup: Setup, way: Way, device: torch.device) -> float:
    layout = _layout(setup)
    num_blocks = layout.num_blocks(setup.handoff_tokens)
    backend = _backend(setup, way.kind)
    storage = None
    if device.type == "cpu":
        storage = backend.allocate(num_blocks * layout.block_bytes)
    cache = KVCache(layout, num_blocks, storage, device).kv_L2NSKD
    try:
        with _second(setup) as pipe:
            offer, receiver = backend.offer(f"gpu-check-{way.name}", cache)
            pipe.send(("connect", offer, int(way.is_to_next_card)))
            receiver.accept(START_TIMEOUT_S)
            max_bytes = _answer(pipe, START_TIMEOUT_S)
            assert isinstance(max_bytes, int)
            spans = plan_spans(
                layout,
                layers=range(layout.num_layers),
                blocks=range(num_blocks),
                max_bytes=max_bytes,
            )
            seconds = min(_take_all(receiver, spans, pipe) for _ in range(4))
            receiver.close()
            return seconds
    finally:
        backend.close()


def _take_all(receiver: Receiver, spans: tuple[Span, ...], pipe: Connection) -> float:
    started_s = time.perf_counter()
    pipe.send(("push", *spans))
    for index, span in enumerate(spans):
        checksum = _answer(pipe, ANSWER_TIMEOUT_S)
        if receiver.take(span, list(span.blocks)) != checksum:
            raise NoAnswer("it delivered other bytes than it was given")
        pipe.send(index)
    seconds = time.perf_counter() - started_s
    _answer(pipe, ANSWER_TIMEOUT_S)
    return seconds


def _push(link: Sender, spans: list[Span], pipe: Connection) -> None:
    num_acknowledged = 0
    for index, span in enumerate(spans):
        while pipe.poll() or not link.has_room():
            link.acknowledge(PieceId(0, pipe.recv()))
            num_acknowledged += 1
        pipe.send(link.send(PieceId(0, index), span, list(span.blocks), list(span.blocks)))
    for _ in range(num_acknowledged, len(spans)):
        link.acknowledge(PieceId(0, pipe.recv()))


def _connected(setup: Setup, offer: Offer, card: int) -> Sender:
    layout = _layout(setup)
    device = torch.device("cpu") if setup.is_dry else torch.device("cuda", card)
    cache = KVCache(layout, layout.num_blocks(setup.handoff_tokens), device=device).kv_L2NSKD
    return _connect(setup, offer, cache.normal_())


def _layout(setup: Setup) -> KVLayout:
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    shape = [int(str(setup.model[name])) for name in names]
    return KVLayout("gpu-check", Dtype.BFLOAT16, 64, *shape)


def _long_prompt(runner: Runner, num_tokens: int) -> SequenceStep:
    """In the last blocks of the cache: the first ones are the streams'."""
    num_blocks = runner.layout.num_blocks(num_tokens)
    blocks = range(runner.num_blocks - num_blocks, runner.num_blocks)
    return SequenceStep([7] * num_tokens, 0, blocks, GREEDY)


def _stream(setup: Setup, runner: Runner, index: int) -> float:
    """Seconds of one decode step of all streams."""
    num = min(NUM_STREAMS, max(setup.decode_batches))
    steps = decode_steps(setup, runner, num, index % setup.num_steps)
    return runner.step(steps).compute_s


@contextmanager
def _second(setup: Setup) -> Iterator[Connection]:
    """A second process with its own view of the card, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(setup, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine
    finally:
        with suppress(OSError):  # it has ended
            mine.send(None)
        process.join(STOP_TIMEOUT_S)
        mine.close()
        process.kill()
        process.join()


def _ask(pipe: Connection, *order: object, timeout_s: float) -> object:
    pipe.send(order)
    return _answer(pipe, timeout_s)


def _answer(pipe: Connection, timeout_s: float) -> object:
    if not pipe.poll(timeout_s):
        raise NoAnswer(f"no answer within {timeout_s:g} s")
    try:
        answer: object = pipe.recv()
    except EOFError as error:
        raise NoAnswer("the second process ended") from error
    if isinstance(answer, NoAnswer):
        raise answer
    return answer
