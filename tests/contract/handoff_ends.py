"""The two ends of one handoff as the workers run them, with a pipe in the place of the stream.

The real state machines, real backends and real processes; only gRPC, the scheduler and the other
requests are missing. `PrefillEnd` runs in threads of the peer process, `DecodeEnd` in the test.
"""

import itertools
import threading
import time

from core.clock import MonotonicClock
from core.errors import PeerLost, TransferFailure
from core.layout import Dtype, KVLayout
from core.link import (
    Abort,
    AbortAck,
    Begin,
    Granted,
    LinkDown,
    Piece,
    PieceAck,
    PieceId,
    Seal,
    Sealed,
    TransferRefused,
)
from core.request import RequestId
from kv_transfer.inbound import InboundState, InboundTransfer
from kv_transfer.outbound import OutboundState, OutboundTransfer
from kv_transfer.plan import PieceSizes, Reservation
from tests.contract.faulty import FaultyChannel

LAYOUT = KVLayout("weights", Dtype.FLOAT32, block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
NUM_PROMPT_TOKENS = 14
LAYER_BYTES = 4 * 2 * LAYOUT.page_bytes
DEADLINE_S = 10.0
POLL_S = 0.005

clock = MonotonicClock()


epochs = itertools.count(1)


def reservation_of(block_ids, num_cached_blocks=0):
    return Reservation(
        RequestId("r"), next(epochs), tuple(block_ids), NUM_PROMPT_TOKENS, num_cached_blocks
    )


def drain(stream):
    """Throw away what is on the stream; one that has ended is empty."""
    try:
        while stream.poll():
            stream.recv()
    except (EOFError, OSError):
        return


class PrefillEnd:
    """Pushes one handoff, a layer a piece; `result` waits until its source blocks are free.

    num_sends counts the sends that were begun.
    """

    def __init__(self, sender, stream, reservation, source_ids, plan):
        self._sender = sender
        self._stream = stream
        self._channel = FaultyChannel(stream.send, plan)
        self._transfer = OutboundTransfer(
            reservation,
            layout=LAYOUT,
            backend="any",
            sizes=PieceSizes(1, LAYER_BYTES),
            deadline_s=clock.now_s() + DEADLINE_S,
        )
        self._source_ids = tuple(source_ids)
        self._changed = threading.Condition()
        self._is_stopped = False
        self.num_sends = 0
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._hear, self._push)]

    def start(self):
        with self._changed:
            self._say(self._transfer.begin())
            self._say(
                self._transfer.computed(NUM_PROMPT_TOKENS, self._source_ids, clock.now_s(), 42)
            )
        for thread in self._threads:
            thread.start()

    def result(self):
        """(state, reason of the failure) in a final state."""
        with self._changed:
            assert self._changed.wait_for(self._has_ended, DEADLINE_S), self._transfer.state
            failure = self._transfer.failure
            return self._transfer.state.value, failure.reason.value if failure else None

    def stop(self):
        """Stop listening; what is still on the stream is thrown away."""
        self._is_stopped = True
        for thread in self._threads:
            thread.join()
        drain(self._stream)

    def _has_ended(self):
        return self._transfer.state in (OutboundState.SEALED, OutboundState.FAILED)

    def _say(self, messages):
        for message in messages:
            self._channel.send(message)

    def _hear(self):
        try:
            while not self._is_stopped:
                if not self._stream.poll(POLL_S):
                    continue
                message = self._stream.recv()
                if isinstance(message, PieceAck):
                    self._sender.acknowledge(PieceId(message.epoch, message.index))
                with self._changed:
                    self._answer(message)
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._transfer.link_lost("the stream ended")
                self._changed.notify_all()

    def _answer(self, message: LinkDown):
        transfer = self._transfer
        if message.epoch != transfer.reservation.epoch:
            return  # of an earlier handoff on this stream
        match message:
            case Granted():
                self._say(transfer.granted())
            case PieceAck():
                transfer.acknowledged(message.index)
            case Sealed():
                transfer.sealed(clock.now_s())
            case TransferRefused():
                transfer.refused(message.reason, message.detail)
            case Abort():
                self._say(transfer.peer_aborted(message.reason, message.detail))

    def _push(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended() or self._can_push(), DEADLINE_S)
                piece = self._transfer.next_piece(clock.now_s())
            if piece is None:
                return
            self.num_sends += 1
            try:
                checksum = self._sender.send(
                    piece.piece_id, piece.span, piece.source_block_ids, piece.target_block_ids
                )
            except PeerLost as error:
                with self._changed:
                    self._transfer.send_failed(str(error))
                    self._changed.notify_all()
                return
            with self._changed:
                self._say(self._transfer.sent(checksum))
                self._changed.notify_all()

    def _can_push(self):
        is_pushing = self._transfer.state is OutboundState.PUSHING
        return is_pushing and self._sender.has_room()


class DecodeEnd:
    """Receives one handoff; `run` hears messages until a condition holds."""

    def __init__(self, receiver, stream, reservation):
        self.transfer = InboundTransfer(
            reservation, layout=LAYOUT, lease_until_s=clock.now_s() + DEADLINE_S
        )
        self.heard = []
        self._receiver = receiver
        self._stream = stream

    @property
    def state(self):
        return self.transfer.state

    def run(self, until):
        until_s = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < until_s, (self.state, self.heard)
            if self._stream.poll(POLL_S):
                self._hear(self._stream.recv())

    def run_to_the_end(self):
        self.run(lambda: self.state in (InboundState.SEALED, InboundState.CLOSED))

    def abort(self):
        self._say(self.transfer.abort(TransferFailure.ABORTED, "the client left", clock.now_s()))

    def lose_link(self):
        """What a decode worker does when the control stream ends."""
        self._stream.close()
        self._receiver.close()
        self.transfer.abort(TransferFailure.LINK_LOST, "the stream ended", clock.now_s())

    def ask_for_proof(self):
        """What it does from then on; True once the blocks may be reused."""
        if self._receiver.is_writer_gone():
            self.transfer.fence()
        return self.state is InboundState.CLOSED

    def _say(self, messages):
        for message in messages:
            self._stream.send(message)

    def _hear(self, message):
        if message.epoch != self.transfer.reservation.epoch:
            return  # of an earlier handoff on this stream
        self.heard.append(message)
        transfer, now_s = self.transfer, clock.now_s()
        match message:
            case Begin():
                self._say(transfer.begin(now_s))
            case Piece():
                self._take(message)
            case Seal():
                self._say(transfer.seal(message.num_pieces, now_s))
            case Abort():
                self._say(transfer.peer_aborted(message.reason, message.detail, now_s))
            case AbortAck():
                transfer.fence()

    def _take(self, piece):
        arrival = self.transfer.arrive(piece, clock.now_s())
        self._say(arrival.messages)
        try:
            checksum = self._receiver.take(piece.span, arrival.target_block_ids)
        except PeerLost as error:
            self._say(self.transfer.take_failed(str(error), clock.now_s()))
            return
        self._say(self.transfer.landed(piece, checksum, clock.now_s()))
