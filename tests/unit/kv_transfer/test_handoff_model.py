"""Both machines of one handoff on one link, in every order of events that there is.

The world holds the ground truth that no machine can see: which bytes are right, who may still
write. `events` lists what can happen next; a bounded exhaustive search follows every one of them
for a small handoff, and hypothesis follows random ones for larger handoffs.

Checked in every state: SEALED only over proven bytes; blocks given back at most once, and never
while anybody can still write into them; source blocks given back once, and not during a send.
Checked of every end: nothing is left, on neither side, once leases expired and peers answered or
died. No event can be repeated for ever, so every order of events comes to such an end.
"""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TransferFailure
from core.layout import Dtype, KVLayout
from core.link import (
    Abort,
    AbortAck,
    Begin,
    Granted,
    Piece,
    PieceAck,
    Seal,
    Sealed,
    TransferRefused,
)
from core.request import RequestId
from kv_transfer.inbound import InboundState, InboundTransfer
from kv_transfer.outbound import OutboundState, OutboundTransfer
from kv_transfer.plan import PieceSizes, Reservation

FOREVER_S = 1e9
DECODE_FINAL = (InboundState.SEALED, InboundState.CLOSED)
PREFILL_FINAL = (OutboundState.SEALED, OutboundState.FAILED)


class World:
    """Two workers, one link, one handoff."""

    def __init__(self, *, is_one_sided, num_layers=1, num_blocks=2, chunks=(1, 2)):
        layout = KVLayout("w", Dtype.BFLOAT16, 1, num_layers, 1, 4)
        reservation = Reservation(
            RequestId("r"), 1, tuple(range(num_blocks)), num_prompt_tokens=num_blocks
        )
        self.prefill = OutboundTransfer(
            reservation,
            layout=layout,
            backend="memory",
            sizes=PieceSizes(1, 2 * layout.page_bytes),
            deadline_s=1.0,
        )
        self.decode = InboundTransfer(reservation, layout=layout, lease_until_s=1.0)
        self.is_one_sided = is_one_sided
        self.chunks = chunks
        self.num_chunks_done = 0
        self.to_decode = deque(self.prefill.begin())
        self.to_prefill = deque()
        self.in_hand = None  # (piece, is it meant for the cache)
        self.sending = False
        self.is_link_up = True
        self.is_prefill_alive = self.is_decode_alive = True
        self.does_prefill_know = self.does_decode_know = False
        self.num_decode_releases = self.num_prefill_releases = 0
        self.num_right = np.zeros((num_layers, num_blocks), dtype=int)

    def copy(self):
        other = _copied(self)
        other.prefill, other.decode = _copied(self.prefill), _copied(self.decode)
        return other

    def key(self):
        """Equal for worlds with the same future: the dead and the words of failures have none."""
        prefill = _state(self.prefill) if self.is_prefill_alive else None
        decode = _state(self.decode) if self.is_decode_alive else None
        return (_state(self), prefill, decode)

    # What can happen next ------------------------------------------------------------------

    def events(self):
        return [name for name in EVENTS if getattr(self, f"can_{name[3:]}")()]

    def _prefill_runs(self):
        return self.is_prefill_alive and not self.does_prefill_know

    def _decode_runs(self):
        return self.is_decode_alive and not self.does_decode_know

    def can_compute(self):
        return (
            self.is_prefill_alive
            and self.prefill.state not in PREFILL_FINAL
            and self.num_chunks_done < len(self.chunks)
        )

    def on_compute(self):
        num_tokens = self.chunks[self.num_chunks_done]
        self.num_chunks_done += 1
        self._say_to_decode(self.prefill.computed(num_tokens, tuple(range(num_tokens)), 0.0, 42))

    def can_start_send(self):
        return self._prefill_runs() and _copied(self.prefill).next_piece(0.0) is not None

    def on_start_send(self):
        self.prefill.next_piece(0.0)
        self.sending = True
        if self.is_one_sided:
            assert not self.num_decode_releases, "a write began into blocks that were given back"

    def can_finish_send(self):
        return self.is_prefill_alive and self.sending

    def on_finish_send(self):
        self.sending = False
        if self.does_prefill_know:
            self.prefill.send_failed("link lost")
        else:
            self._say_to_decode(self.prefill.sent(checksum=1))

    def can_reach_decode(self):
        return self._decode_runs() and bool(self.to_decode) and self.in_hand is None

    def on_reach_decode(self):
        decode = self.decode
        match self.to_decode.popleft():
            case Begin():
                self._say_to_prefill(decode.begin(0.0))
            case Piece() as piece:
                arrival = decode.arrive(piece, 0.0)
                self._say_to_prefill(arrival.messages)
                self.in_hand = (piece, arrival.target_block_ids is not None)
            case Seal(num_pieces=num_pieces):
                self._say_to_prefill(decode.seal(num_pieces, 0.0))
            case Abort(reason=reason, detail=detail):
                self._say_to_prefill(decode.peer_aborted(reason, detail, 0.0))
            case AbortAck():
                decode.fence()

    def can_take_right(self):
        return self.is_decode_alive and self.in_hand is not None

    can_take_wrong = can_take_fail = can_take_right

    def on_take_right(self):
        piece, is_for_cache = self.in_hand
        self.in_hand = None
        span = piece.span
        if is_for_cache:
            layers = slice(span.layers.start, span.layers.stop)
            self.num_right[layers, span.blocks.start : span.blocks.stop] += 1
        self._say_to_prefill(self.decode.landed(piece, piece.checksum, 0.0))

    def on_take_wrong(self):
        piece, _ = self.in_hand
        self.in_hand = None
        self._say_to_prefill(self.decode.landed(piece, piece.checksum + 1, 0.0))

    def on_take_fail(self):
        self.in_hand = None
        self.decode.take_failed("the sender fell silent", 0.0)
        self.is_link_up = False
        self.on_decode_sees_loss()

    def can_reach_prefill(self):
        return self._prefill_runs() and bool(self.to_prefill)

    def on_reach_prefill(self):
        prefill = self.prefill
        match self.to_prefill.popleft():
            case Granted():
                self._say_to_decode(prefill.granted())
            case PieceAck(index=index):
                prefill.acknowledged(index)
            case Sealed():
                prefill.sealed(0.0)
            case TransferRefused(reason=reason, detail=detail):
                prefill.refused(reason, detail)
            case Abort(reason=reason, detail=detail):
                self._say_to_decode(prefill.peer_aborted(reason, detail))

    # Time, cancels and faults --------------------------------------------------------------

    def can_prefill_times_out(self):
        return self._prefill_runs() and self.prefill.state in (
            OutboundState.BEGINNING,
            OutboundState.PUSHING,
            OutboundState.SEALING,
        )

    def on_prefill_times_out(self):
        self._say_to_decode(self.prefill.tick(FOREVER_S))

    def can_decode_times_out(self):
        return self.is_decode_alive and self.decode.state in (
            InboundState.RESERVED,
            InboundState.RECEIVING,
        )

    def on_decode_times_out(self):
        self._say_to_prefill(self.decode.tick(FOREVER_S))

    def can_fence_overdue(self):
        return self._decode_runs() and self.decode.is_fence_overdue(FOREVER_S)

    def on_fence_overdue(self):
        self.is_link_up = False
        self.on_decode_sees_loss()

    def can_break_link(self):
        return self.is_link_up

    def on_break_link(self):
        self.is_link_up = False

    def can_prefill_dies(self):
        return self.is_prefill_alive

    def on_prefill_dies(self):
        self.is_prefill_alive = self.is_link_up = self.sending = False
        self.to_prefill.clear()

    def can_decode_dies(self):
        return self.is_decode_alive

    def on_decode_dies(self):
        self.is_decode_alive = self.is_link_up = False
        self.in_hand = None
        self.to_decode.clear()

    def can_prefill_sees_loss(self):
        return self._prefill_runs() and not self.is_link_up

    def on_prefill_sees_loss(self):
        self.does_prefill_know = True
        self.to_prefill.clear()
        self.prefill.link_lost("stream ended")

    def can_decode_sees_loss(self):
        return self._decode_runs() and not self.is_link_up

    def on_decode_sees_loss(self):
        self.does_decode_know = True
        self.to_decode.clear()
        self.decode.abort(TransferFailure.LINK_LOST, "stream ended", 0.0)

    def can_decode_proves_writer_gone(self):
        closed_by_prefill = self.does_prefill_know and not self.sending
        is_gone = not self.is_one_sided or not self.is_prefill_alive or closed_by_prefill
        return (
            self.is_decode_alive
            and self.does_decode_know
            and is_gone
            and self.decode.state is InboundState.ABORTING
            and self.in_hand is None
        )

    def on_decode_proves_writer_gone(self):
        self.decode.fence()

    # What must hold ------------------------------------------------------------------------

    def step(self, event):
        getattr(self, event)()
        if self.is_decode_alive and self.decode.try_release_blocks() is not None:
            self.num_decode_releases += 1
            assert self.in_hand is None or not self.in_hand[1], "a piece was in hand"
            assert not (self.is_one_sided and self.sending), "the writer was writing"
        if self.is_prefill_alive and self.prefill.try_release_blocks():
            self.num_prefill_releases += 1
            assert not self.sending, "source blocks were given back during a send"
        self.check()

    def check(self):
        assert self.num_decode_releases <= 1
        assert self.num_prefill_releases <= 1
        if self.decode.state is InboundState.SEALED:
            assert (self.num_right == 1).all(), "sealed over bytes that were not proven"
            assert not self.num_decode_releases
            assert not self.sending
        if self.prefill.state is OutboundState.SEALED:
            assert self.decode.state is InboundState.SEALED

    def check_end(self):
        if self.is_decode_alive:
            assert self.decode.state in DECODE_FINAL
            is_closed = self.decode.state is InboundState.CLOSED
            assert self.num_decode_releases == is_closed
        if self.is_prefill_alive:
            assert self.prefill.state in PREFILL_FINAL
            assert self.num_prefill_releases == 1

    def _say_to_decode(self, messages):
        if self.is_link_up and not self.does_prefill_know:
            self.to_decode.extend(messages)

    def _say_to_prefill(self, messages):
        if self.is_link_up and not self.does_decode_know:
            self.to_prefill.extend(messages)


def _copied(thing):
    """A copy that shares only what is never changed in place."""
    other = object.__new__(type(thing))
    for name, value in vars(thing).items():
        is_shared = not isinstance(value, deque | dict | np.ndarray)
        setattr(other, name, value if is_shared else value.copy())
    return other


def _state(thing):
    return tuple(
        _frozen(value) for name, value in vars(thing).items() if name not in WITHOUT_FUTURE
    )


def _frozen(value):
    match value:
        case np.ndarray():
            return value.tobytes()
        case dict():
            return tuple(value.items())
        case deque():
            return tuple(value)
        case _:
            return value


WITHOUT_FUTURE = frozenset(("prefill", "decode", "reservation", "_layout", "failure"))
EVENTS = tuple(name for name in vars(World) if name.startswith("on_"))
FAULTS = frozenset(
    ("on_break_link", "on_prefill_dies", "on_decode_dies", "on_take_wrong", "on_take_fail")
)


def reachable_ends(world):
    """(states, ends) of every order of events; checks invariants on the way.

    A path that came back to its own state would never have to end: that is checked too.
    """
    seen, ends, on_path = {}, [], set()
    stack = [(world.key(), world, iter(world.events()))]
    seen[stack[0][0]] = True
    on_path.add(stack[0][0])
    while stack:
        key, here, remaining = stack[-1]
        event = next(remaining, None)
        if event is None:
            stack.pop()
            on_path.discard(key)
            continue
        there = here.copy()
        there.step(event)
        there_key = there.key()
        assert there_key not in on_path, f"{event} leads back: this can go on for ever"
        if there_key in seen:
            continue
        seen[there_key] = True
        events = there.events()
        if not set(events) - FAULTS:
            there.check_end()
            ends.append(there)
        on_path.add(there_key)
        stack.append((there_key, there, iter(events)))
    return len(seen), ends


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two-sided", "one-sided"])
def test_every_order_of_events_of_a_small_handoff_ends_well(is_one_sided):
    num_states, ends = reachable_ends(World(is_one_sided=is_one_sided))
    assert num_states > 1_000
    outcomes = {(end.prefill.state, end.decode.state) for end in ends if end.is_link_up}
    assert (OutboundState.SEALED, InboundState.SEALED) in outcomes
    assert (OutboundState.FAILED, InboundState.CLOSED) in outcomes


@settings(max_examples=150, deadline=None)
@given(data=st.data(), is_one_sided=st.booleans(), num_faults=st.integers(0, 2))
def test_random_orders_of_events_of_larger_handoffs_end_well(data, is_one_sided, num_faults):
    world = World(is_one_sided=is_one_sided, num_layers=2, num_blocks=4, chunks=(1, 3, 4))
    while True:
        events = world.events()
        if num_faults == 0:
            events = [event for event in events if event not in FAULTS]
        if not set(events) - FAULTS:
            break
        event = data.draw(st.sampled_from(events))
        num_faults -= event in FAULTS
        world.step(event)
    world.check_end()


def test_without_faults_the_handoff_is_sealed():
    world = World(is_one_sided=True, num_layers=2, num_blocks=4, chunks=(1, 3, 4))
    unwanted = FAULTS | {"on_prefill_times_out", "on_decode_times_out"}
    while events := [event for event in world.events() if event not in unwanted]:
        world.step(events[0])
    world.check_end()
    assert world.prefill.state is OutboundState.SEALED
    assert world.decode.state is InboundState.SEALED
    assert world.prefill.num_unacknowledged == 0


class ForgetfulInbound(InboundTransfer):
    """A wrong machine: it frees blocks without waiting for the writer."""

    def begin(self, now_s):
        messages = super().begin(now_s)
        self._is_writer_fenced = True
        return messages


class TrustingInbound(InboundTransfer):
    """A wrong machine: it seals what it did not prove."""

    def landed(self, piece, checksum, now_s):
        return super().landed(piece, piece.checksum, now_s)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (ForgetfulInbound, "the writer was writing|blocks that were given back"),
        (TrustingInbound, "not proven"),
    ],
)
def test_the_search_finds_a_machine_that_is_wrong(wrong, why):
    world = World(is_one_sided=True)
    world.decode = wrong(world.decode.reservation, layout=world.decode._layout, lease_until_s=1.0)
    with pytest.raises(AssertionError, match=why):
        reachable_ends(world)
