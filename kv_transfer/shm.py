"""Transfer on one host: the decode worker's cache is shared memory, prefill writes in place.

The cache lies in a memfd: it has no name, no size limit of a mount, and vanishes with the last
process that maps it, also after SIGKILL. Each link is a Unix socket in the abstract namespace
(nothing on disk): over it the memfd is handed to the sender, and its state is the proof that the
fence needs. The sender unmaps before it closes the socket, and the kernel tears down a dying
process's memory before its files (Linux, do_exit: exit_mm, then exit_files), so the end of the
socket means that this writer cannot write any more. No process id is ever believed.

1. `allocate` makes and maps the memfd.
2. `offer` listens on a fresh abstract address and names it, with a nonce.
3. `connect` sends the nonce, receives the memfd, maps it, says so.
4. `accept` checks user and nonce, hands out the memfd, waits for "mapped".
5. `send` copies pages straight into decode's cache; `take` hashes them where they lie.
"""

import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

import torch

from core.errors import PeerLost
from core.link import PieceId, Span
from kv_transfer.backend import BackendKind, Offer
from kv_transfer.door import MAX_GUESTS, remaining_s, wait_for_hello
from kv_transfer.lifeline import boot_id, has_ended, shut_down
from kv_transfer.pages import HostPages

MAX_PIECE_BYTES = 4 * 1024 * 1024

_NONCE_BYTES = 16
_HANDED_OVER = b"cache"
_MAPPED = b"mapped"
_UCRED = struct.Struct("iii")


def host_id() -> str:
    """Equal for two processes exactly if shm can join them: kernel, network namespace, user."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}/uid:{os.getuid()}"


class ShmBackend:
    """The decode worker's cache in shared memory, and the sockets that hand it out."""

    kind = BackendKind.SHM.value

    def __init__(self) -> None:
        self._memfd = -1
        self._storage: torch.Tensor | None = None
        self._receivers: list[ShmReceiver] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed storage in a memfd whose size is sealed, with all its pages present."""
        assert self._storage is None
        self._memfd = os.memfd_create("twophase-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memfd, num_bytes)
        # A cache that could shrink would kill whoever touches it (SIGBUS).
        fcntl.fcntl(self._memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._storage = torch.frombuffer(_map(self._memfd, num_bytes), dtype=torch.uint8)
        return self._storage

    @property
    def fd(self) -> int:
        """What another rank of this worker maps."""
        return self._memfd

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, "ShmReceiver"]:
        """A new link into `cache_L2NSKD`, which lies in the storage that was allocated."""
        assert self._storage is not None
        offset = cache_L2NSKD.data_ptr() - self._storage.data_ptr()
        assert 0 <= offset <= self._storage.nbytes - cache_L2NSKD.nbytes
        receiver = ShmReceiver(link_id, self._memfd, cache_L2NSKD)
        self._receivers = [r for r in self._receivers if not r.is_writer_gone()]
        self._receivers.append(receiver)
        parameters = {
            "address": receiver.address,
            "nonce": receiver.nonce.hex(),
            "storage_bytes": str(self._storage.nbytes),
            "cache_offset": str(offset),
            "num_blocks": str(cache_L2NSKD.shape[2]),
        }
        return Offer(self.kind, parameters), receiver

    def close(self) -> None:
        """Close every link's socket and the memfd; the mapping lives as long as its tensors."""
        for receiver in self._receivers:
            receiver.discard()
        self._receivers.clear()
        self._storage = None
        if self._memfd >= 0:
            os.close(self._memfd)
            self._memfd = -1


class ShmReceiver:
    """Decode's end of a link: hands the cache out once, then watches the writer's socket."""

    def __init__(self, link_id: str, memfd: int, cache_L2NSKD: torch.Tensor) -> None:
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.address = f"twophase-kv-{secrets.token_hex(8)}"
        self._link_id = link_id
        self._memfd = memfd
        self._pages: HostPages | None = HostPages(cache_L2NSKD)
        self._lock = threading.Lock()
        self._writer: socket.socket | None = None
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(MAX_GUESTS)

    def accept(self, timeout_s: float) -> None:
        """Hand the cache to the sender that knows the nonce, once it has connected."""
        until_s = time.monotonic() + timeout_s
        try:
            self._hand_over(until_s)
        except OSError as error:
            raise PeerLost(self._link_id, f"no sender mapped the cache: {error}") from error
        finally:
            self._listener.close()

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Checksum of the piece where it already lies; 0 if it is to be thrown away."""
        if target_block_ids is None:
            return 0
        if self._pages is None:
            raise PeerLost(self._link_id, "the link is closed")
        return self._pages.checksum(span, target_block_ids)

    def is_writer_gone(self) -> bool:
        """True once the link is closed and the writer's socket has ended, or never existed."""
        with self._lock:
            if not self._is_closed:
                return False
            if self._writer is not None and not has_ended(self._writer):
                return False
            self._drop_writer()
            return True

    def close(self) -> None:
        """Stop handing out and tell the writer; its socket stays until its end is proven."""
        with self._lock:
            self._is_closed = True
            self._pages = None
            shut_down(self._listener, socket.SHUT_RDWR)
            self._listener.close()
            if self._writer is not None:
                shut_down(self._writer, socket.SHUT_WR)

    def discard(self) -> None:
        """Close all, proof or not: this process is about to give up the cache itself."""
        self.close()
        with self._lock:
            self._drop_writer()

    def _hand_over(self, until_s: float) -> None:
        connection, _ = wait_for_hello(self._listener, _NONCE_BYTES, self._is_sender, until_s)
        with self._lock:
            if self._is_closed:
                connection.close()
                raise OSError("the link was closed")
            # From here on the peer may hold the cache: its socket is what proves the end.
            self._writer = connection
        connection.settimeout(remaining_s(until_s))
        socket.send_fds(connection, [_HANDED_OVER], [self._memfd])
        if connection.recv(len(_MAPPED)) != _MAPPED:
            raise OSError("the sender went away")

    def _is_sender(self, connection: socket.socket, nonce: bytes) -> bool:
        return _user_of(connection) == os.getuid() and hmac.compare_digest(nonce, self.nonce)

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ShmSender:
    """Prefill's end of a link: decode's cache, mapped into this process."""

    def __init__(self, offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> None:
        self._peer = offer.parameters["address"]
        self._lock = threading.Lock()
        self._source = HostPages(cache_L2NSKD)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._mapping = self._receive_cache(offer, timeout_s)
        except OSError as error:
            self._socket.close()
            raise PeerLost(self._peer, f"it did not hand out its cache: {error}") from error
        shape = list(cache_L2NSKD.shape)
        shape[2] = int(offer.parameters["num_blocks"])
        # A view of all that follows, so that pages of further ranks can be reached.
        behind = torch.frombuffer(self._mapping, dtype=torch.uint8)[
            int(offer.parameters["cache_offset"]) :
        ]
        num_bytes = torch.Size(shape).numel() * cache_L2NSKD.itemsize
        self._target: HostPages | None = HostPages(
            behind[:num_bytes].view(cache_L2NSKD.dtype).view(shape)
        )

    @property
    def max_piece_bytes(self) -> int:
        """Small enough that decode checks a piece while the next is written."""
        return MAX_PIECE_BYTES

    def has_room(self) -> bool:
        """Always: there is no staging."""
        return True

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Write the piece into decode's cache; the checksum of its bytes."""
        with self._lock:
            if self._target is None or has_ended(self._socket):
                raise PeerLost(self._peer, f"the link was closed before {piece_id}")
            return self._source.copy_to(self._target, span, source_block_ids, target_block_ids)

    def acknowledge(self, piece_id: PieceId) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Unmap decode's cache, then end the socket: in this order it is the proof."""
        with self._lock:
            if self._target is None:
                return
            self._target = None
            self._mapping.close()
            self._socket.close()

    def _receive_cache(self, offer: Offer, timeout_s: float) -> mmap.mmap:
        until_s = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        self._socket.connect("\0" + self._peer)
        self._socket.send(bytes.fromhex(offer.parameters["nonce"]))
        self._socket.settimeout(remaining_s(until_s))
        _, memfds, _, _ = socket.recv_fds(self._socket, len(_HANDED_OVER), 1)
        if not memfds:
            raise OSError("it closed the connection")
        try:
            mapping = _map(memfds[0], int(offer.parameters["storage_bytes"]))
        finally:
            os.close(memfds[0])
        # A forked child would keep the mapping beyond the end of the socket.
        mapping.madvise(mmap.MADV_DONTFORK)
        self._socket.send(_MAPPED)
        return mapping


def connect(offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> ShmSender:
    """The sender's end of the link that `offer` describes.

    Raises:
        PeerLost: decode did not hand out its cache within `timeout_s`.
    """
    return ShmSender(offer, cache_L2NSKD, timeout_s)


def _map(memfd: int, num_bytes: int) -> mmap.mmap:
    """The memfd, mapped for writing with all page-table entries made now, not at first touch."""
    return mmap.mmap(memfd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, user_id, _ = _UCRED.unpack(credentials)
    return int(user_id)
