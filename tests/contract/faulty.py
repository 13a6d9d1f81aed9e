"""Links that misbehave to order: the official double for faults, around any backend.

`FaultySender`, `FaultyReceiver` and `FaultyChannel` stand between the protocol and a real sender,
receiver or control stream, and do to the nth call of a step what a `Fault` says. They keep the
contracts of what they wrap: a send that sleeps is in progress, and its Abort waits for it. No
product code imports this module; tests hand `faulty_connect` or a `FaultyBackend` to whoever
takes a connect function or a backend.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from core.errors import PeerLost
from core.link import LinkDown, LinkUp, Piece, PieceId, Span
from kv_transfer.backend import Offer, Receiver, ReceiverBackend, Sender
from kv_transfer.cuda.device_pages import pages_of

Result = TypeVar("Result")
Connect = Callable[[Offer, torch.Tensor, float], Sender]


class Step(StrEnum):
    """Where a fault strikes: a call at one end of the link, or a message on its stream."""

    OPEN_LINK = "OpenLink"
    LINK_OPENED = "LinkOpened"
    LINK_REFUSED = "LinkRefused"
    CONNECT = "connect"
    ACCEPT = "accept"
    SEND = "send"
    TAKE = "take"
    ACKNOWLEDGE = "acknowledge"
    CLOSE = "close"
    BEGIN = "Begin"
    GRANTED = "Granted"
    PIECE = "Piece"
    PIECE_ACK = "PieceAck"
    SEAL = "Seal"
    SEALED = "Sealed"
    TRANSFER_REFUSED = "TransferRefused"
    ABORT = "Abort"
    ABORT_ACK = "AbortAck"


class FaultKind(StrEnum):
    """What happens there.

    SLEEP waits before the step, DELAY after it; RAISE is PeerLost in its place; DROP skips it as
    if it had been done; DUPLICATE does it twice; CORRUPT changes what arrives, not what is said
    of it (of a Piece message: the checksum).
    """

    SLEEP = "sleep"
    DELAY = "delay"
    RAISE = "raise"
    DROP = "drop"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"


_CALLED_ONCE = {FaultKind.SLEEP, FaultKind.DELAY, FaultKind.RAISE}
_CANNOT_FAIL = {FaultKind.SLEEP, FaultKind.DELAY, FaultKind.DROP, FaultKind.DUPLICATE}
_POSSIBLE = {
    Step.CONNECT: _CALLED_ONCE,
    Step.ACCEPT: _CALLED_ONCE,
    Step.SEND: set(FaultKind),
    Step.TAKE: set(FaultKind),
    Step.ACKNOWLEDGE: _CANNOT_FAIL,
    Step.CLOSE: _CANNOT_FAIL,
    Step.PIECE: set(FaultKind),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong: at the nth call of a step, counted from 0; None: at each."""

    step: Step
    kind: FaultKind
    nth: int | None = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot happen, such as a corrupt close: a test of it would prove nothing."""
        if self.kind not in _POSSIBLE.get(self.step, _CANNOT_FAIL | {FaultKind.RAISE}):
            raise ValueError(f"{self.step} cannot {self.kind}")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that goes wrong on one link end; an empty plan changes nothing."""

    faults: tuple[Fault, ...] = ()


class Script:
    """A plan being played: counts the calls of each step. Thread-safe.

    Several ends may play one script; `order` begins another plan for all of them.
    """

    def __init__(self, plan: FaultPlan = FaultPlan()) -> None:
        self._plan = plan
        self._num_calls: Counter[Step] = Counter()
        self._num_struck = 0
        self._lock = threading.Lock()

    @property
    def num_struck(self) -> int:
        """Faults of the plan that have happened."""
        return self._num_struck

    def order(self, *faults: Fault) -> None:
        """From now on play these faults, with all calls counted from 0."""
        with self._lock:
            self._plan = FaultPlan(faults)
            self._num_calls.clear()
            self._num_struck = 0

    def play(
        self,
        step: Step,
        act: Callable[[], Result],
        *,
        dropped: Callable[[], Result],
        corrupted: Callable[[], Result] | None = None,
    ) -> Result:
        """The outcome of one call: of `act`, or of what stands for it in its fault."""
        fault = self.next(step)
        match fault.kind if fault else None:
            case None:
                return act()
            case FaultKind.RAISE:
                raise PeerLost("peer", f"a fault was ordered at {step}")
            case FaultKind.DROP:
                return dropped()
            case FaultKind.CORRUPT:
                assert corrupted is not None
                return corrupted()
        assert fault is not None
        if fault.kind is FaultKind.SLEEP:
            time.sleep(fault.seconds)
        result = act()
        if fault.kind is FaultKind.DELAY:
            time.sleep(fault.seconds)
        return act() if fault.kind is FaultKind.DUPLICATE else result

    def next(self, step: Step) -> Fault | None:
        """What goes wrong at this call of the step; counts the call."""
        with self._lock:
            call = self._num_calls[step]
            self._num_calls[step] += 1
            for fault in self._plan.faults:
                if fault.step is step and fault.nth in (None, call):
                    self._num_struck += 1
                    return fault
        return None


def _script_of(plan: FaultPlan | Script) -> Script:
    return plan if isinstance(plan, Script) else Script(plan)


class FaultySender:
    """A sender whose steps go wrong by plan; `cache_L2NSKD` is the one that it sends from."""

    def __init__(
        self, sender: Sender, plan: FaultPlan | Script, cache_L2NSKD: torch.Tensor
    ) -> None:
        self._sender = sender
        self._script = _script_of(plan)
        self._cache_L2NSKD = cache_L2NSKD
        self._pages = pages_of(cache_L2NSKD)

    @property
    def max_piece_bytes(self) -> int:
        """As the wrapped sender has it."""
        return self._sender.max_piece_bytes

    def has_room(self) -> bool:
        """As the wrapped sender has it."""
        return self._sender.has_room()

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """The checksum of what should have arrived, whatever did."""

        def act() -> int:
            return self._sender.send(piece_id, span, source_block_ids, target_block_ids)

        def true_checksum() -> int:
            return self._pages.checksum(span, source_block_ids)

        def corrupted() -> int:
            checksum = true_checksum()
            self._flip_bit(span, source_block_ids)
            try:
                act()
            finally:
                self._flip_bit(span, source_block_ids)
            return checksum

        return self._script.play(Step.SEND, act, dropped=true_checksum, corrupted=corrupted)

    def acknowledge(self, piece_id: PieceId) -> None:
        """Free the piece's staging buffer, late, twice or never."""
        self._script.play(
            Step.ACKNOWLEDGE, lambda: self._sender.acknowledge(piece_id), dropped=_nothing
        )

    def close(self) -> None:
        """Give up the link, late, twice or never."""
        # Looked up at each call: a close that puts another in its place is not called twice.
        self._script.play(Step.CLOSE, lambda: self._sender.close(), dropped=_nothing)

    def _flip_bit(self, span: Span, block_ids: Sequence[int]) -> None:
        page = self._cache_L2NSKD[span.layers.stop - 1, 1, block_ids[-1]]
        page.view(-1).view(torch.uint8)[-1] ^= 1


class FaultyReceiver:
    """A receiver whose steps go wrong by plan."""

    def __init__(self, receiver: Receiver, plan: FaultPlan | Script) -> None:
        self._receiver = receiver
        self._script = _script_of(plan)

    def accept(self, timeout_s: float) -> None:
        """Wait until the sender's end is built; longer, or in vain."""
        self._script.play(Step.ACCEPT, lambda: self._receiver.accept(timeout_s), dropped=_nothing)

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Take a piece; a dropped one is thrown away, a corrupt one has another checksum."""

        def act() -> int:
            return self._receiver.take(span, target_block_ids)

        def thrown_away() -> int:
            return self._receiver.take(span, None)

        return self._script.play(Step.TAKE, act, dropped=thrown_away, corrupted=lambda: act() ^ 1)

    def is_writer_gone(self) -> bool:
        """As the wrapped receiver proves it: of this no test may lie."""
        return self._receiver.is_writer_gone()

    def close(self) -> None:
        """Give up the link, late, twice or never."""
        self._script.play(Step.CLOSE, self._receiver.close, dropped=_nothing)


class FaultyChannel:
    """One direction of a control stream; messages keep their order, as they do on a stream."""

    def __init__(self, send: Callable[[LinkUp | LinkDown], None], plan: FaultPlan | Script) -> None:
        self._send = send
        self._script = _script_of(plan)

    def send(self, message: LinkUp | LinkDown) -> None:
        """Pass the message on, late, twice, changed or never."""

        def corrupted() -> None:
            assert isinstance(message, Piece)
            self._send(dataclasses.replace(message, checksum=message.checksum ^ 1))

        step = Step(type(message).__name__)
        self._script.play(step, lambda: self._send(message), dropped=_nothing, corrupted=corrupted)


class FaultyBackend:
    """A backend whose receivers go wrong, each by the same plan from its start."""

    def __init__(self, backend: ReceiverBackend, plan: FaultPlan) -> None:
        self._backend = backend
        self._plan = plan

    @property
    def kind(self) -> str:
        """The wrapped backend's name: the sender's end is its own."""
        return self._backend.kind

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """As the wrapped backend does."""
        return self._backend.allocate(num_bytes)

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, FaultyReceiver]:
        """A new link whose receiver goes wrong."""
        offer, receiver = self._backend.offer(link_id, cache_L2NSKD)
        return offer, FaultyReceiver(receiver, self._plan)

    def close(self) -> None:
        """As the wrapped backend does."""
        self._backend.close()


def faulty_connect(connect: Connect, plan: FaultPlan | Script) -> Connect:
    """`connect`, late or in vain, with senders that go wrong, each by the same plan."""
    script = _script_of(plan)

    def connect_faulty(offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> Sender:
        def act() -> Sender:
            return FaultySender(connect(offer, cache_L2NSKD, timeout_s), plan, cache_L2NSKD)

        return script.play(Step.CONNECT, act, dropped=act)

    return connect_faulty


def _nothing() -> None:
    return None
