"""How fast a link is, told from the pieces that it carried: no probe ever touches a cache.

Pure: facts and times in, an estimate out. Each acknowledged piece gives its bytes and its round
trip, from just before `send` until decode's acknowledgement: staging, hashing, transport and check
included, because that is what a request waits for.

Latency is the shortest recent round trip: an upper bound, as even that piece had bytes.

Bandwidth comes from busy time. A link serves its pieces in order, so a piece that waits for its
predecessor keeps the link busy only from that one's acknowledgement on. Consecutive pieces form
groups, and the estimate is the median of the groups' rates (a median of means): averaging absorbs
acknowledgements that are heard in one go, the median absorbs a stall. Idle time counts nowhere.

`piece_sizes` is what the estimate is for: how many bytes are worth a piece of their own.
"""

import statistics
from collections import deque
from dataclasses import dataclass

from core.link import PieceId
from core.signals import Window
from kv_transfer.plan import PieceSizes

GROUP_PIECES = 4
NUM_GROUPS = 16
NUM_ROUND_TRIPS = GROUP_PIECES * NUM_GROUPS
MIN_PIECE_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What is known of a link; None while nothing is, num_* say on how many pieces it rests."""

    latency_s: float | None
    num_latency_pieces: int
    bytes_per_s: float | None
    num_bandwidth_pieces: int


@dataclass(slots=True)
class _Group:
    num_pieces: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.busy_s


class LinkMeter:
    """The pieces of one link as far as they tell its speed, and the bytes that it carried lately.

    Invariants: a piece counts once, when it is acknowledged; at most NUM_GROUPS whole groups and
    one unfinished one are remembered.
    """

    def __init__(self) -> None:
        self._carried = Window()
        self._carries_since_s = 0.0
        self._under_way: dict[PieceId, tuple[int, float]] = {}
        self._round_trips_s: deque[float] = deque(maxlen=NUM_ROUND_TRIPS)
        self._groups: deque[_Group] = deque(maxlen=NUM_GROUPS)
        self._group = _Group()
        self._served_until_s = float("-inf")

    @property
    def speed(self) -> LinkSpeed:
        """The estimate; a link with less than one whole group is judged by what there is."""
        groups = self._groups or ([self._group] if self._group.busy_s > 0 else [])
        return LinkSpeed(
            latency_s=min(self._round_trips_s, default=None),
            num_latency_pieces=len(self._round_trips_s),
            bytes_per_s=statistics.median(g.bytes_per_s for g in groups) if groups else None,
            num_bandwidth_pieces=sum(g.num_pieces for g in groups),
        )

    def carried_per_s(self, now_s: float) -> float | None:
        """Bytes per second of the window, or since a link that was idle before it carries again.

        So a link that is as busy as it can be shows it at once. None where it carried nothing.
        """
        per_s = self._carried.per_s(now_s)
        if per_s is None:
            return None
        covered_s = self._carried.covered_s(now_s)
        return per_s * covered_s / min(covered_s, max(now_s - self._carries_since_s, 1e-9))

    def sent(self, piece_id: PieceId, num_bytes: int, started_s: float) -> None:
        """The piece was handed to the backend; `started_s`: just before that."""
        if not self._under_way and self._carried.is_empty(started_s):
            self._carries_since_s = started_s
        self._under_way[piece_id] = (num_bytes, started_s)

    def acknowledged(self, piece_id: PieceId, now_s: float) -> None:
        """Decode took the piece; one that is unknown, or was acknowledged before, counts not."""
        if piece_id not in self._under_way:
            return
        num_bytes, started_s = self._under_way.pop(piece_id)
        self._round_trips_s.append(now_s - started_s)
        self._carried.note(num_bytes, now_s)
        group = self._group
        group.num_pieces += 1
        group.num_bytes += num_bytes
        group.busy_s += max(0.0, now_s - max(started_s, self._served_until_s))
        self._served_until_s = now_s
        if group.num_pieces >= GROUP_PIECES and group.busy_s > 0:
            self._groups.append(group)
            self._group = _Group()


def piece_sizes(speed: LinkSpeed, most: int) -> PieceSizes:
    """Bounds of a link's pieces, of which none may be over `most` bytes.

    A piece of latency x bandwidth bytes spends half of its time on the round trip; smaller ones
    cost more than they hide, so layers wait for each other until they make up as much, and a small
    prompt goes as one piece. The floor keeps a link that only ever carried small pieces, whose rate
    is that of its round trips, from asking for smaller and smaller ones; it is also what a new link
    starts with, since a probe would have to write into a cache.
    """
    smallest = MIN_PIECE_BYTES
    if speed.latency_s is not None and speed.bytes_per_s is not None:
        smallest = max(smallest, int(speed.latency_s * speed.bytes_per_s))
    return PieceSizes(min(smallest, most), most)
