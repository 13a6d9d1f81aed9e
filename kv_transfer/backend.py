"""The seam between the protocol of a handoff and the bytes: what every backend must do.

A link joins one prefill worker to one decode worker. The decode worker's `ReceiverBackend` makes
an offer and a `Receiver` for each link; the offer travels to the prefill worker on the control
stream, where `connection.connect` turns it into a `Sender`. Knows nothing of requests, epochs or
leases: blocks are named by cache block ids, and whether a piece counts is decided elsewhere.

Rules that hold for all backends:

- The pieces of a link are sent by one thread, and their headers follow on the control stream in
  the same order; the receiver takes every announced piece, in that order.
- Checksums cover the bytes in plan order, so they are equal on both sides whatever the block ids.
- Any failure is `PeerLost`: the link is closed by both sides and never used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from core.errors import ConfigError
from core.link import PieceId, Span

# Of a piece up to this size no byte is read any more when `send` has returned.
STAGED_PIECE_BYTES = 4 * 1024 * 1024


class BackendKind(StrEnum):
    """Names of the backends, as in the configuration."""

    SHM = "shm"
    IPC = "ipc"
    TORCH = "torch"
    NIXL = "nixl"
    MEMORY = "memory"


CONFIGURABLE = ("auto", "shm", "ipc", "torch", "nixl")

_FIELD = "transfer.backend"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sender needs to reach a receiver; every parameter is text, ready for the wire."""

    kind: str
    parameters: dict[str, str]


class Receiver(Protocol):
    """Decode's end of one link; used by the link's own thread, except `is_writer_gone`."""

    def accept(self, timeout_s: float) -> None:
        """Wait until the sender's end is built.

        Raises:
            PeerLost: it was not within `timeout_s`, or it broke while being built.

        Contract: called once; may block up to `timeout_s`.
        """
        ...

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Complete the arrival of the piece whose header just came; its checksum as it arrived.

        Afterwards the bytes lie in the target blocks. None: they are thrown away and the value
        means nothing.

        Raises:
            PeerLost: the sender died or fell silent.

        Contract: may block up to the backend's timeout.
        """
        ...

    def is_writer_gone(self) -> bool:
        """True once no byte can reach the cache through this link any more.

        Never true between `accept` and `close` while the sender's end lives. After `close` it is
        true at once for backends whose receiver does the writing, and as soon as the sender has
        closed or its process has died for those that write in place.

        Contract: side-effect free for the caller; thread-safe; never blocks.
        """
        ...

    def close(self) -> None:
        """Give up the link. Contract: idempotent; `is_writer_gone` stays usable."""
        ...


class Sender(Protocol):
    """Prefill's end of one link: `send` runs in one thread, the rest may be called from any."""

    @property
    def max_piece_bytes(self) -> int:
        """The `max_bytes` with which pieces for this link are planned."""
        ...

    def has_room(self) -> bool:
        """True if `send` has a free staging buffer; one-sided backends always do."""
        ...

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Hand the piece to the transport; the checksum of its bytes.

        On return a one-sided backend no longer writes, and the source blocks are no longer read;
        of a piece over STAGED_PIECE_BYTES they may be, until it is acknowledged or the link is
        closed. Who gives them up before has given up the handoff: what is read then, decode throws
        away or refuses by its checksum.

        Raises:
            PeerLost: the link is broken.

        Contract: caller keeps ownership of both blocks; needs `has_room`.
        """
        ...

    def acknowledge(self, piece_id: PieceId) -> None:
        """Decode took the piece off the link: its staging buffer is free. Idempotent."""
        ...

    def close(self) -> None:
        """Give up the link; nothing is written afterwards. Contract: idempotent, at once."""
        ...


class ReceiverBackend(Protocol):
    """One per decode worker process."""

    @property
    def kind(self) -> str:
        """The backend's name."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Storage for the KV cache: flat uint8, zeroed. Contract: called once, before offers."""
        ...

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, Receiver]:
        """A new link into `cache_L2NSKD`. `link_id` was never used before in this process."""
        ...

    def close(self) -> None:
        """Give up everything but the storage, which lives as long as its tensors. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker's cache lies, and by what it can be reached.

    host_id as told by `shm.host_id`, device as torch names it; has_nixl: the extra `rdma` is
    installed; has_rdma: the host has an active InfiniBand or RoCE port. card names the card that
    the cache lies on, and reachable_cards those whose memory this worker can map and write to from
    there (`cuda.card`); empty on a CPU.
    """

    host_id: str
    device: str
    has_nixl: bool = False
    has_rdma: bool = False
    card: str = ""
    reachable_cards: tuple[str, ...] = ()

    @property
    def is_on_card(self) -> bool:
        """Whether the cache lies in a card's memory."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend for one pair of workers, and why, in words."""

    kind: BackendKind
    why: str


def choose_backend(configured: str, *, prefill: Endpoint, decode: Endpoint) -> Choice:
    """The backend for a pair: the configured one, or with "auto" the fastest that reaches.

    Raises:
        ConfigError: the configured backend does not exist or cannot join this pair, or none can.
    """
    if configured not in CONFIGURABLE:
        raise ConfigError(_FIELD, f"{configured!r} is not one of {', '.join(CONFIGURABLE)}")
    if prefill.is_on_card is not decode.is_on_card:
        raise ConfigError(
            "engine.device",
            f"one cache lies on {prefill.device}, the other on {decode.device}: no backend moves "
            "blocks between a CPU and a card",
        )
    if configured == "auto":
        return _fastest(prefill, decode)
    obstacle = _obstacle(BackendKind(configured), prefill, decode)
    if obstacle:
        raise ConfigError(_FIELD, obstacle, "auto")
    return Choice(BackendKind(configured), "it is configured")


def _obstacle(kind: BackendKind, prefill: Endpoint, decode: Endpoint) -> str:
    """Why this backend cannot join the pair; empty if it can."""
    pair = f"{prefill.device} on {prefill.host_id} and {decode.device} on {decode.host_id}"
    if kind is BackendKind.SHM and not _can_share_memory(prefill, decode):
        return f"shm cannot join {pair}"
    if kind is BackendKind.IPC and not _can_map(prefill, decode):
        return (
            f"ipc cannot join {pair}: prefill cannot map the memory of decode's card "
            f"{decode.card or '(none)'}"
        )
    if kind is BackendKind.NIXL and not (prefill.has_nixl and decode.has_nixl):
        where = _where_nixl_is_missing(prefill, decode)
        return f"nixl is not installed {where}: pip install twophase[rdma]"
    if kind is BackendKind.TORCH and _is_one_card(prefill, decode):
        return f"torch cannot join {pair}: both are one card, and NCCL joins no two ranks there"
    return ""


def _fastest(prefill: Endpoint, decode: Endpoint) -> Choice:
    if _can_share_memory(prefill, decode):
        return Choice(BackendKind.SHM, "both caches lie in the memory of one host")
    is_one_card = _is_one_card(prefill, decode)
    if _can_map(prefill, decode):
        where = "on one card" if is_one_card else "on cards of one host with peer access"
        return Choice(BackendKind.IPC, f"the workers are {where}")
    has_nixl = prefill.has_nixl and decode.has_nixl
    where, gain = "on different hosts", "an active RDMA port at each"
    is_worth_nixl = prefill.has_rdma and decode.has_rdma
    if prefill.host_id == decode.host_id and prefill.is_on_card:
        where, gain = "on cards of one host without peer access", "CUDA IPC or the host's memory"
        is_worth_nixl = True
    if is_one_card:
        where = "on one card, in containers that share no memory"
        if not has_nixl:
            raise ConfigError(
                _FIELD,
                f"the workers are {where} (one --ipc=host would let them), NCCL joins no two ranks "
                f"there, and nixl is not installed {_where_nixl_is_missing(prefill, decode)}",
            )
    if not is_worth_nixl:
        return Choice(BackendKind.TORCH, f"the workers are {where}")
    if not has_nixl:
        missing = f"nixl is not installed {_where_nixl_is_missing(prefill, decode)}"
        return Choice(BackendKind.TORCH, f"the workers are {where}, with {gain}, but {missing}")
    return Choice(BackendKind.NIXL, f"the workers are {where}, with {gain}")


def _can_share_memory(prefill: Endpoint, decode: Endpoint) -> bool:
    return prefill.host_id == decode.host_id and prefill.device == decode.device == "cpu"


def _can_map(prefill: Endpoint, decode: Endpoint) -> bool:
    return prefill.host_id == decode.host_id and decode.card in prefill.reachable_cards


def _is_one_card(prefill: Endpoint, decode: Endpoint) -> bool:
    """By uuid alone: two containers that cannot map each other's memory may share a card."""
    return prefill.is_on_card and _uuid_of(prefill.card) == _uuid_of(decode.card) != ""


def _uuid_of(card: str) -> str:
    return card.partition("/")[0]


def _where_nixl_is_missing(prefill: Endpoint, decode: Endpoint) -> str:
    ends = (("prefill", prefill), ("decode", decode))
    return "at " + " and ".join(name for name, end in ends if not end.has_nixl)
