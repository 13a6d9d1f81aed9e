"""Drives a DecodeWorker by hand: routers, links and the device are played by the test.

Time stands still unless the test moves it. `World.events` gathers what each router session was
told. A `FakeLink` is a prefill worker: whether its process still lives is a flag.
"""

import dataclasses
from collections import defaultdict

from core.config import Mode
from core.layout import Dtype, KVLayout
from core.link import Abort, AbortAck, Begin, Piece, Seal, Span
from core.request import Request, RequestId, SamplingParams
from core.worker import RequestFailed, Reserve, Reserved, Role, WorkerInfo
from decode_worker.limits import Limits
from decode_worker.scheduler import Scheduler
from decode_worker.worker import DecodeWorker
from engine.batch import StepResult
from engine.block_pool import BlockPool

BLOCK = 4
LAYOUT = KVLayout("w", Dtype.BFLOAT16, BLOCK, num_layers=2, num_kv_heads=1, head_dim=8)
FIRST_TOKEN = 50
SESSION = "session-0"
LINK = "link-0"


def make_request(request_id="r", num_tokens=6, *, first=0, deadline_s=1000.0, **sampling):
    sampling.setdefault("max_tokens", 3)
    prompt = tuple(range(first, first + num_tokens))
    return Request(RequestId(request_id), prompt, SamplingParams(**sampling), deadline_s)


class FakeLink:
    """A prefill worker at the other end of a link; also the link's receiver."""

    def __init__(self, world, link_id):
        self.world, self.link_id = world, link_id
        self.said = []
        self.num_drops = 0
        self.is_lost = False
        self.is_alive = True

    def is_writer_gone(self):
        return not self.is_alive

    def drop(self):
        self.num_drops += 1

    def hear(self, message):
        """The decode worker hears `message`; what it said back."""
        num_said = len(self.said)
        self.world.worker.handoffs.hear(self.link_id, message, self.world.now_s)
        self.world.worker.settle(self.world.now_s)
        return tuple(self.said[num_said:])

    def take(self, piece, checksum=None):
        """One piece comes off the link; where its bytes went."""
        handoffs, now_s = self.world.worker.handoffs, self.world.now_s
        arrival = handoffs.arrive(self.link_id, piece, now_s)
        checksum = piece.checksum if checksum is None else checksum
        handoffs.landed(self.link_id, piece, checksum, now_s)
        self.world.worker.settle(now_s)
        return arrival

    def lose(self, *, is_alive=False):
        """Its stream ends; `is_alive` leaves the process able to write."""
        self.is_alive = is_alive
        self.is_lost = True
        self.world.worker.handoffs.lose_link(self.link_id, "stream ended", self.world.now_s)
        self.world.worker.settle(self.world.now_s)

    def begin(self, request_id="r"):
        return self.hear(Begin(request_id, self.world.epoch(request_id)))

    def push(self, request_id="r", *, stop=None):
        """Send the pieces, or only those before `stop`; all headers."""
        pieces = self.world.pieces(request_id)
        for piece in pieces[:stop]:
            self.take(piece)
        return pieces

    def seal(self, request_id="r", *, first_token=FIRST_TOKEN):
        num_pieces = len(self.world.pieces(request_id))
        return self.hear(Seal(request_id, self.world.epoch(request_id), num_pieces, first_token))

    def hand_over(self, request_id="r", *, first_token=FIRST_TOKEN):
        """A whole handoff."""
        self.begin(request_id)
        self.push(request_id)
        return self.seal(request_id, first_token=first_token)

    def abort(self, epoch, reason, request_id="r"):
        return self.hear(Abort(request_id, epoch, reason, "the client left"))

    def acknowledge(self, epoch, request_id="r"):
        return self.hear(AbortAck(request_id, epoch))


class World:
    """One decode worker and everybody around it."""

    def __init__(
        self, mode=Mode.DISAGGREGATED, *, num_blocks=16, budget=8, max_sequences=4, max_waiting=4
    ):
        info = WorkerInfo(
            name="decode-0",
            role=Role.DECODE,
            incarnation="1",
            model="tiny",
            layout=LAYOUT,
            num_blocks=num_blocks,
            max_context_tokens=48,
            vocab_size=512,
            max_num_sequences=max_sequences,
            kernels="none: a test",
        )
        self.pool = BlockPool(num_blocks, BLOCK)
        scheduler = Scheduler(mode, max_batch_tokens=budget, max_num_sequences=max_sequences)
        self.worker = DecodeWorker(info, self.pool, scheduler, Limits(48, max_waiting))
        self.counts_at_start = self.pool.counts()
        self.now_s = 0.0
        self.links = {}
        self.reservations = {}
        self._events = defaultdict(list)

    # Routers -------------------------------------------------------------------------------

    def reserve(self, request=None, *, session=SESSION, is_local=False, **changes):
        """A router asks; what it was told at once."""
        request = request or make_request(**changes)
        self.worker.reserve(session, Reserve(request, is_local), self.now_s)
        return self.events(session)

    def cancel(self, request_id="r", session=SESSION):
        self.worker.cancel(session, request_id, self.now_s)

    def lose_session(self, session=SESSION):
        self.worker.lose_session(session, self.now_s)

    def events(self, session=SESSION):
        """What the session was told since the last call, in order."""
        for session_id, update in self.worker.take_updates().items():
            self._events[session_id] += update.events
        events, self._events[session] = self._events[session], []
        for event in events:
            if isinstance(event, Reserved):
                self.reservations[event.request_id] = event.reservation
        return events

    def error(self, session=SESSION):
        """The one failure that the session was told."""
        (event,) = self.events(session)
        assert isinstance(event, RequestFailed)
        return event.error

    # Prefill workers ------------------------------------------------------------------------

    def link(self, link_id=LINK):
        link = self.links[link_id] = FakeLink(self, link_id)
        self.worker.handoffs.add_link(link_id, link, say=link.said.append, drop=link.drop)
        return link

    def epoch(self, request_id="r"):
        self.events()
        return self.reservations[request_id].epoch

    def pieces(self, request_id="r"):
        """Headers of a whole handoff: one piece for each layer of what has to be shipped."""
        reservation = self.reservations[request_id]
        first_block = reservation.num_shared_blocks
        num_blocks = len(reservation.block_ids) - first_block
        return [
            Piece(
                request_id,
                reservation.epoch,
                layer,
                Span(layer, 1, first_block, num_blocks),
                num_bytes=2 * num_blocks * LAYOUT.page_bytes,
                checksum=7 + layer,
            )
            for layer in range(LAYOUT.num_layers)
        ]

    # The device and the clock -----------------------------------------------------------------

    def start_step(self):
        return self.worker.next_steps(self.now_s)

    def end_step(self, steps, compute_s=0.25):
        """Sampled tokens are 100 + the length of their sequence."""
        tokens = [None if step.sampling is None else 100 + step.end for step in steps]
        self.worker.apply(StepResult(tokens, compute_s), self.now_s)

    def step(self):
        steps = self.start_step()
        self.end_step(steps)
        return steps

    def run(self, num_steps=100):
        """Step until there is nothing to compute."""
        for _ in range(num_steps):
            if not self.step():
                return
        raise AssertionError("it never ends")

    def pass_s(self, seconds):
        self.now_s += seconds
        self.worker.tick(self.now_s)


def assert_nothing_is_left(world):
    """Every count of the worker is back where it began; only live links are known."""
    worker, counts = world.worker, world.pool.counts()
    held = {
        "waiting": worker.census.num_waiting,
        "known": worker.census.num_known,
        "running": worker.census.num_running,
        "reservations": worker.census.num_reservations,
        "waiting tokens": worker.census.num_waiting_tokens,
        "open handoffs": worker.handoffs.num_open,
        "being fenced": len(worker._custody.left),
    }
    assert held == dict.fromkeys(held, 0)
    # What the prefix index still finds lies in free blocks.
    assert dataclasses.replace(counts, cached=0) == world.counts_at_start
    assert set(worker.handoffs._links) == {i for i, link in world.links.items() if not link.is_lost}
    assert world.start_step() == []
