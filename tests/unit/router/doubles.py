"""Workers that live in the test: the official doubles at the seam `twophase.peer.Peer`.

A `FakeCluster` stands for the network: `connect` takes the place of `Peer`, so the fleet and the
dispatcher above it are the real ones. A worker does nothing by itself; the test lets it speak.
"""

import asyncio
import dataclasses
import itertools

from core.errors import DeadlineExceeded, PeerLost
from core.layout import Dtype, KVLayout
from core.request import FinishReason, Request, RequestId, SamplingParams
from core.timeline import DecodeReport, PrefillReport, TransferReport
from core.worker import (
    DecodeDone,
    DecodeUpdate,
    FirstToken,
    Held,
    NewToken,
    RemoteReservation,
    RequestFailed,
    Reserved,
    Role,
    WorkerInfo,
    WorkerStatus,
)

LAYOUT = KVLayout("w", Dtype.FLOAT32, block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)
PREFILL_REPORT = PrefillReport(queue_s=0.5, prefill_s=1.5, num_cached_tokens=4, num_chunks=2)
TRANSFER_REPORT = TransferReport("memory", 512, 2, push_s=0.75, exposed_s=0.25)
DECODE_REPORT = DecodeReport(slot_wait_s=0.125, decode_s=2.0)
DONE = DecodeDone(FinishReason.LENGTH, DECODE_REPORT)
END = object()
WORKER_TIMEOUT_S = 4.0
WEDGED_AFTER_S = 60.0


def make_request(request_id="r", *, num_prompt_tokens=6, deadline_s=1e9, **sampling):
    sampling.setdefault("max_tokens", 3)
    return Request(
        RequestId(request_id),
        tuple(range(num_prompt_tokens)),
        SamplingParams(**sampling),
        deadline_s,
    )


def make_info(name, role=Role.DECODE, *, layout=LAYOUT, incarnation="1", **changes):
    fields = {
        "num_blocks": 16,
        "max_context_tokens": 64,
        "vocab_size": 512,
        "max_num_sequences": 4,
    }
    return WorkerInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        model="tiny",
        layout=layout,
        kernels="reference: a test",
        **(fields | changes),
    )


def make_status(info):
    names = [name for name in WorkerStatus.__dataclass_fields__ if name.startswith("num_")]
    return WorkerStatus(
        name=info.name,
        role=info.role,
        address=f"{info.name}:1",
        pid=1,
        **{name: int(name == "num_steps") for name in names},
    )


def reserved(request_id="r", *, decode="decode-0", num_shared_tokens=4):
    return Reserved(
        request_id,
        RemoteReservation(
            decode_worker=decode,
            decode_address=f"{decode}:1",
            decode_incarnation="1",
            epoch=1,
            block_ids=(3, 5),
            num_shared_blocks=num_shared_tokens // 4,
            num_shared_tokens=num_shared_tokens,
            prompt_digest=9,
        ),
    )


def token(index, *, request_id="r", token_id=None, done=None, prefill=None):
    return NewToken(request_id, 100 + index if token_id is None else token_id, index, done, prefill)


FIRST = FirstToken(100, PREFILL_REPORT)


class FakeStream:
    """What one side says and the test answers; ends with END or an error."""

    def __init__(self):
        self.sent = []
        self.is_closed = False
        self._incoming = asyncio.Queue()

    def send(self, message):
        self.sent.append(message)

    def say(self, *messages):
        for message in messages:
            self._incoming.put_nowait(message)

    def close(self):
        self.is_closed = True

    async def __aiter__(self):
        while (message := await self._incoming.get()) is not END:
            if isinstance(message, Exception):
                raise message
            yield message


class FakeWorker:
    """One worker process: alive until `die`, speaking when told to."""

    def __init__(self, info):
        self.info = info
        self.address = f"{info.name}:1"
        self.status = make_status(info)
        self.stream = FakeStream()
        self.calls = []
        self.num_open_calls = 0
        self.refusal = None
        self.num_heartbeats = 0
        self._heartbeats = asyncio.Queue()

    @property
    def commands(self):
        return self.stream.sent

    def update(self, *events):
        """Say one DecodeUpdate on the router's session."""
        kinds = {Reserved: [], NewToken: [], RequestFailed: [], Held: []}
        for event in events:
            kinds[type(event)].append(event)
        *others, held = (tuple(said) for said in kinds.values())
        self.stream.say(DecodeUpdate(*others, held=held))

    def die(self, why="killed"):
        self.refusal = PeerLost(self.info.name, why)
        self._heartbeats.put_nowait(self.refusal)
        self.stream.say(self.refusal)
        for call in self.calls:
            call.say(self.refusal)

    def leave_heartbeat_unanswered(self):
        self._heartbeats.put_nowait(DeadlineExceeded("no answer"))

    def answer_heartbeat(self, **changes):
        """Answer one status call of the fleet, and every other caller from now on, like this."""
        self.status = dataclasses.replace(self.status, **changes)
        self._heartbeats.put_nowait(self.status)

    async def heartbeat(self):
        """Ends only as the test says; each is one status call of the fleet."""
        self.num_heartbeats += 1
        said = await self._heartbeats.get()
        if isinstance(said, Exception):
            raise said
        return said


class FakePeer:
    """A connection to a FakeWorker."""

    def __init__(self, worker):
        self.address = worker.address
        self.is_closed = False
        self._worker = worker

    async def info(self, timeout_s):
        if self._worker.refusal is not None:
            raise self._worker.refusal
        return self._worker.info

    async def status(self, timeout_s):
        if self._worker.refusal is not None:
            raise self._worker.refusal
        if timeout_s == WORKER_TIMEOUT_S:
            return await self._worker.heartbeat()
        return self._worker.status

    def session(self):
        return self._worker.stream

    async def prefill(self, request, reservation, held_id=None):
        worker, call = self._worker, FakeStream()
        call.request, call.reservation, call.held_id = request, reservation, held_id
        worker.calls.append(call)
        worker.num_open_calls += 1
        try:
            async for event in call:
                yield event
        finally:
            worker.num_open_calls -= 1

    def migrate(self, held_id, request, reservation):
        return self.prefill(request, reservation, held_id)

    async def close(self):
        self.is_closed = True


class FakeCluster:
    """The network: which worker answers at which address."""

    def __init__(self):
        self.workers = {}
        self.peers = []

    def start(self, name, role=Role.DECODE, **changes):
        worker = FakeWorker(make_info(name, role, **changes))
        self.workers[worker.address] = worker
        return worker

    def connect(self, address, clock, credentials):
        peer = FakePeer(self.workers[address])
        self.peers.append(peer)
        return peer


async def until(fact, *, num_turns=200):
    """Let other tasks run until `fact()` holds; fails if it does not soon."""
    for _ in itertools.repeat(None, num_turns):
        if fact():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to pass")
