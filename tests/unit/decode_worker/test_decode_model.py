"""A decode worker under random interleavings of routers, links, device and time.

The machine holds the ground truth that the worker cannot see: which writer may still write where,
and what really lies in each slot of the cache (the tokens up to and including that place, or
garbage). Checked after every event:

- a block that a writer may reach, that the running step uses, or that a handoff to another decode
  worker reads, is neither free nor reserved anew, and what is read lies there;
- a step, and a shared prefix, read only what really lies there;
- each router hears of each life in order: one grant, tokens 0, 1, ..., at most one end;
- Sealed is said only over pieces that all came, unharmed.

At the end no cancel helps: deadlines and leases alone must bring every count back to its start.
"""

from dataclasses import dataclass, field, replace

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.config import Mode
from core.errors import TransferFailure, TwophaseError
from core.link import Abort, AbortAck, Begin, Granted, Seal, Sealed
from core.request import Request
from core.worker import Held, NewToken, RemoteReservation, RequestFailed, Reserved
from tests.unit.decode_worker.driver import (
    BLOCK,
    LAYOUT,
    World,
    assert_nothing_is_left,
    make_request,
)

NUM_BLOCKS = 7
GARBAGE = None
names = st.sampled_from("abcdef")
sessions = st.sampled_from(["s0", "s1"])
link_ids = st.integers(0, 1)


@dataclass
class Life:
    """One request from its Reserve to its end, as its router sees it."""

    request: Request
    session: str
    is_local: bool
    reservation: RemoteReservation | None = None
    num_tokens: int = 0
    is_held: bool = False
    is_over: bool = False


@dataclass
class Writer:
    """A prefill worker that was granted leave to write into one reservation."""

    link: object
    request: Request
    reservation: RemoteReservation
    checksums_right: list[bool] = field(default_factory=list)

    @property
    def fresh_block_ids(self):
        return self.reservation.block_ids[self.reservation.num_shared_blocks :]


@dataclass
class Departure:
    """A handoff that reads the KV cache of an answer; it is a session of its own."""

    session: str
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]


class DecodeMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(Mode.CHUNKED, num_blocks=NUM_BLOCKS, budget=5, max_waiting=2)
        self.pool = self.world.pool
        self.links = [self.world.link("link-0"), self.world.link("link-1")]
        self.num_links = 2
        self.lives = {}  # (session, name) -> the latest life
        self.granted = {}  # name -> the latest life that was granted
        self.writers = []
        self.departures = []
        self.num_departures = 0
        self.steps = None
        self.slots = [[GARBAGE] * BLOCK for _ in range(NUM_BLOCKS)]

    # Routers -------------------------------------------------------------------------------

    @rule(
        name=names,
        session=sessions,
        length=st.integers(1, 14),
        first=st.sampled_from([0, 100]),
        max_tokens=st.integers(1, 5),
        seconds=st.integers(1, 60),
        num_pieces=st.sampled_from(["local", "none", 0, 1, "sealed", "sealed"]),
        which=link_ids,
    )
    def reserve(  # one wide rule, so that even short runs reach late states
        self, name, session, length, first, max_tokens, seconds, num_pieces, which
    ):
        is_local = num_pieces == "local"
        request = make_request(
            name,
            length,
            first=first,
            max_tokens=max_tokens,
            deadline_s=self.world.now_s + seconds,
        )
        life = Life(request, session, is_local)
        current = self.lives.get((session, name))
        if current is not None and not current.is_over:
            return  # a router uses an id once at a time
        self.lives[session, name] = life
        events = self.world.reserve(request, session=session, is_local=is_local)
        self.listen(session, events)
        if life.reservation is not None and num_pieces not in ("local", "none"):
            self.hand_over(name, self.links[which], num_pieces)

    def hand_over(self, name, link, num_pieces):
        writer = self.begin_one(name, link)
        if writer is not None:
            for _ in range(LAYOUT.num_layers if num_pieces == "sealed" else num_pieces):
                self.push_one(writer)
            if num_pieces == "sealed":
                self.seal_one(writer)
        self.hear_all()

    @rule(name=names, session=sessions)
    def cancel(self, name, session):
        self.world.cancel(name, session)
        life = self.lives.pop((session, name), None)
        if life is not None:
            life.is_over = True
        self.hear_all()

    @rule(session=sessions)
    def lose_session(self, session):
        self.world.lose_session(session)
        for key in [key for key in self.lives if key[0] == session]:
            self.lives.pop(key).is_over = True
        self.hear_all()

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), is_shipped=st.booleans(), seconds=st.sampled_from([0.0, 0.0, 60.0]))
    def hold(self, data, is_shipped, seconds):
        session, name = key = data.draw(st.sampled_from(sorted(self.lives)))
        self.world.worker.hold(session, name, self.world.now_s)
        self.hear_all()
        if key in self.held() and is_shipped:
            self.ship(session, name)
            self.pass_s(seconds)

    @precondition(lambda self: any(self.held()))
    @rule(data=st.data())
    def ship_one(self, data):
        held = self.held()
        self.ship(*data.draw(st.sampled_from(held)))

    def held(self):
        lives = self.lives.items()
        return sorted(key for key, life in lives if life.is_held and not life.is_over)

    def ship(self, session, name):
        life = self.lives.pop((session, name))
        life.is_over = True
        prompt = life.request.prompt_token_ids
        tokens = (*prompt, *(100 + len(prompt) + index for index in range(life.num_tokens)))
        self.num_departures += 1
        departure = Departure(f"m{self.num_departures}", tokens, ())
        request = replace(life.request, prompt_token_ids=tokens)
        departure.block_ids = self.world.worker.ship(departure.session, name, request)
        self.departures.append(departure)
        event("ships")

    @precondition(lambda self: self.departures)
    @rule(data=st.data())
    def close_departure(self, data):
        departure = data.draw(st.sampled_from(self.departures))
        self.departures.remove(departure)
        told = self.world.events(departure.session)
        event(f"its session was told {[type(said).__name__ for said in told]}")
        self.world.worker.shipped(departure.session, self.world.now_s)
        self.hear_all()

    def hear_all(self):
        for session in ("s0", "s1"):
            self.listen(session, self.world.events(session))

    def listen(self, session, events):
        for said in events:
            life = self.lives.get((session, said.request_id))
            if life is None:
                continue  # said before the cancel
            assert not life.is_over, f"told after the end: {said}"
            event(f"told: {type(said).__name__}")
            match said:
                case Reserved():
                    assert life.reservation is None
                    life.reservation = said.reservation
                    self.granted[said.request_id] = life
                    self.check_shared(life)
                case NewToken():
                    self.check_token(life, said)
                    life.is_over = said.done is not None
                case Held():
                    life.is_held = True
                case RequestFailed():
                    event(f"failed: {getattr(said.error, 'reason', type(said.error).__name__)}")
                    life.is_over = True

    def check_token(self, life, token):
        assert life.reservation is not None
        assert token.index == life.num_tokens
        assert token.token_id == 100 + life.request.num_prompt_tokens + token.index
        assert (token.prefill is not None) == (token.index == 0)
        life.num_tokens += 1
        assert (token.done is not None) == (life.num_tokens == life.request.sampling.max_tokens)

    def check_shared(self, life):
        reservation, prompt = life.reservation, life.request.prompt_token_ids
        event(f"shared blocks: {reservation.num_shared_blocks}")
        assert reservation.num_shared_tokens < len(prompt)
        self.check_lies_there(prompt, reservation.block_ids, reservation.num_shared_tokens)

    def check_lies_there(self, tokens, block_table, num_tokens):
        for place in range(num_tokens):
            found = self.slots[block_table[place // BLOCK]][place % BLOCK]
            assert found == tuple(tokens[: place + 1]), f"place {place} holds {found}"

    # Links -----------------------------------------------------------------------------------

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), which=link_ids)
    def begin(self, data, which):
        self.begin_one(data.draw(st.sampled_from(sorted(self.granted))), self.links[which])
        self.hear_all()

    def begin_one(self, name, link):
        life = self.granted[name]
        epoch = life.reservation.epoch
        if link.is_lost or life.is_local:
            return None
        if not any(isinstance(answer, Granted) for answer in link.hear(Begin(name, epoch))):
            return None
        assert all(writer.reservation.epoch != epoch for writer in self.writers)
        writer = Writer(link, life.request, life.reservation)
        self.writers.append(writer)
        life.num_tokens = 1  # the first one comes from prefill
        return writer

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), is_right=st.sampled_from([True, True, True, False]))
    def push(self, data, is_right):
        self.push_one(data.draw(st.sampled_from(self.writers)), is_right)
        self.hear_all()

    def push_one(self, writer, is_right=True):
        index = len(writer.checksums_right)
        if writer.link.is_lost or index == LAYOUT.num_layers:
            return
        self.world.reservations[writer.request.request_id] = writer.reservation
        piece = self.world.pieces(writer.request.request_id)[index]
        arrival = writer.link.take(piece, piece.checksum if is_right else 0)
        writer.checksums_right.append(is_right)
        for block_id in arrival.target_block_ids or ():
            assert block_id in writer.fresh_block_ids
            self.slots[block_id] = [GARBAGE] * BLOCK

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def seal(self, data):
        self.seal_one(data.draw(st.sampled_from(self.writers)))
        self.hear_all()

    def seal_one(self, writer):
        if writer.link.is_lost:
            return
        prompt, reservation = writer.request.prompt_token_ids, writer.reservation
        is_whole = writer.checksums_right == [True] * LAYOUT.num_layers
        self.writers.remove(writer)
        # What the writer wrote lies there before decode can take any of it for proven.
        for place in range(reservation.num_shared_tokens, len(prompt) if is_whole else 0):
            slot = self.slots[reservation.block_ids[place // BLOCK]]
            slot[place % BLOCK] = tuple(prompt[: place + 1])
        message = Seal(
            writer.request.request_id, reservation.epoch, LAYOUT.num_layers, 100 + len(prompt)
        )
        if any(isinstance(answer, Sealed) for answer in writer.link.hear(message)):
            event("sealed")
            assert is_whole
            self.end_if_first_token_is_last(writer)

    def end_if_first_token_is_last(self, writer):
        for life in self.lives.values():
            if life.reservation == writer.reservation and life.request.sampling.max_tokens == 1:
                life.is_over = True

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), is_answer=st.booleans())
    def give_up(self, data, is_answer):
        """The writer stops: by its own Abort, or by its answer to decode's."""
        writer = data.draw(st.sampled_from(self.writers))
        name, epoch = writer.request.request_id, writer.reservation.epoch
        is_asked = any(isinstance(m, Abort) and m.epoch == epoch for m in writer.link.said)
        if writer.link.is_lost or (is_answer and not is_asked):
            return
        self.writers.remove(writer)
        if is_answer:
            writer.link.hear(AbortAck(name, epoch))
        else:
            writer.link.hear(Abort(name, epoch, TransferFailure.ABORTED, "gave up"))
        self.hear_all()

    @rule(which=link_ids, is_alive=st.booleans())
    def lose_link(self, which, is_alive):
        link = self.links[which]
        if not link.is_alive:
            self.links[which] = self.world.link(f"link-{self.num_links}")
            self.num_links += 1
        elif link.is_lost:
            link.is_alive = is_alive
        else:
            link.lose(is_alive=is_alive)
        self.writers = [writer for writer in self.writers if writer.link.is_alive]
        self.hear_all()

    # The device and the clock -----------------------------------------------------------------

    @precondition(lambda self: self.steps is None)
    @rule()
    def start_step(self):
        self.steps = self.world.start_step() or None
        for step, (sequence, _) in zip(self.steps or (), self.world.worker._in_step, strict=True):
            tokens = [*sequence.request.prompt_token_ids, *sequence.output_token_ids]
            assert list(step.token_ids) == tokens[step.start : step.end]
            self.check_lies_there(tokens, step.block_table, step.start)
            for place in range(step.start, step.end):
                slot = tuple(tokens[: place + 1])
                self.slots[step.block_table[place // BLOCK]][place % BLOCK] = slot

    @precondition(lambda self: self.steps is None)
    @rule(num_steps=st.integers(1, 6))
    def run_steps(self, num_steps):
        for _ in range(num_steps):
            self.start_step()
            if self.steps is not None:
                self.end_step()

    @precondition(lambda self: self.steps is not None)
    @rule()
    def end_step(self):
        steps, self.steps = self.steps, None
        self.world.end_step(steps)
        self.hear_all()

    @precondition(lambda self: self.steps is not None)
    @rule()
    def fail_step(self):
        for step in self.steps:
            for place in range(step.start, step.end):
                self.slots[step.block_table[place // BLOCK]][place % BLOCK] = GARBAGE
        self.steps = None
        self.world.worker.step_failed(TwophaseError("boom"), self.world.now_s)
        self.hear_all()

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0]))
    def pass_s(self, seconds):
        self.world.pass_s(seconds)
        self.hear_all()

    # What must always hold --------------------------------------------------------------------

    @invariant()
    def blocks_that_somebody_may_touch_are_not_free(self):
        for writer in self.writers:
            for block_id in writer.fresh_block_ids:
                assert block_id not in self.pool._free
                assert self.pool.epoch_of(block_id) == writer.reservation.epoch
        for step in self.steps or ():
            assert not set(step.block_table) & set(self.pool._free)
        for departure in self.departures:
            assert not set(departure.block_ids) & set(self.pool._free)
            self.check_lies_there(departure.tokens, departure.block_ids, len(departure.tokens) - 1)

    @invariant()
    def counts_agree(self):
        counts, worker = self.pool.counts(), self.world.worker
        assert counts.free + counts.used + counts.quarantined == NUM_BLOCKS
        num_alive = sum(not life.is_over for life in self.lives.values())
        assert worker.census.num_known == num_alive + len(self.departures)
        assert worker.census.num_waiting <= 2
        num_ended = sum(sequence.is_shipped for sequence in worker._custody.left)
        num_here = worker.census.num_waiting + worker.census.num_reservations
        assert num_here + num_ended == worker.census.num_known

    def teardown(self):
        if self.steps is not None:
            self.end_step()
        for departure in self.departures:
            self.world.worker.shipped(departure.session, self.world.now_s)
        for link in self.world.links.values():
            link.is_alive = False  # at last every writer that was lost dies
        for _ in range(4):
            self.pass_s(30.0)
            for link in self.world.links.values():
                if link.num_drops and not link.is_lost:
                    link.lose()
        self.pass_s(1.0)
        assert all(life.is_over for life in self.lives.values())
        assert_nothing_is_left(self.world)


DecodeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestAnyInterleaving = DecodeMachine.TestCase
