"""A request `r` in a chosen state at a decode worker, and every fault that may hit it there."""

import dataclasses

from core.config import Mode
from core.errors import TransferFailure, TwophaseError
from core.link import AbortAck, TransferRefused
from core.worker import RequestFailed
from tests.unit.decode_worker.driver import LINK, World, make_request

DEADLINE_S = 10.0


class Case:
    """A request `r` in some state, and the faults that may hit it."""

    def __init__(self, state, *, mode=Mode.DISAGGREGATED):
        self.world = world = World(mode, num_blocks=8)
        self.link = world.link()
        self.steps = None
        if state == "waiting":
            world.reserve(make_request("blocker", 27, first=200), session="blocker")
        world.reserve(make_request(deadline_s=DEADLINE_S))
        self.is_granted = state != "waiting"
        if state in ("receiving", "running", "in step"):
            self.link.begin()
            self.link.push(stop=1 if state == "receiving" else None)
        if state in ("running", "in step"):
            self.link.seal()
        if state == "in step":
            self.steps = world.start_step()
        self.used_at_start = world.pool.counts().used

    def cancel(self):
        self.world.cancel()

    def session_lost(self):
        self.world.lose_session()

    def deadline(self):
        self.world.pass_s(DEADLINE_S)

    def link_lost_and_writer_gone(self):
        self.link.lose()

    def link_lost_and_writer_alive(self):
        self.link.lose(is_alive=True)

    def writer_aborts(self):
        epoch = self.world.epoch() if self.is_granted else 1
        answer = self.link.abort(epoch, TransferFailure.ABORTED)
        assert answer == (AbortAck("r", epoch),)

    def bad_checksum(self):
        self.link.take(self.world.pieces()[1], checksum=0)

    def missing_piece(self):
        (answer,) = self.link.seal()
        assert isinstance(answer, TransferRefused)
        assert answer.reason is TransferFailure.MISSING_PIECES

    def piece_outside(self):
        piece = self.world.pieces()[1]
        span = dataclasses.replace(piece.span, first_block=1)
        self.link.take(dataclasses.replace(piece, span=span))

    def take_fails(self):
        now_s, piece = self.world.now_s, self.world.pieces()[1]
        self.world.worker.handoffs.arrive(LINK, piece, now_s)
        self.world.worker.handoffs.take_failed(LINK, piece, "killed", now_s)
        self.world.worker.settle(now_s)

    def step_fails(self):
        self.steps = None
        self.world.worker.step_failed(TwophaseError("boom"), self.world.now_s)

    def end_step(self):
        self.world.end_step(self.steps)
        self.steps = None

    def told(self):
        """The one failure that the router was told, as (kind, transfer reason); None if none."""
        failures = [event for event in self.world.events() if isinstance(event, RequestFailed)]
        if not failures:
            return None
        (failure,) = failures
        assert failure.request_id == "r"
        return type(failure.error), getattr(failure.error, "reason", None)

    def end_blocker(self):
        self.world.cancel("blocker", session="blocker")
