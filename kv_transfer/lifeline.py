"""A socket between the two ends of a link, by which decode knows that its writer is gone.

For backends where prefill's process writes into decode's memory. The sender says hello (nonce,
kernel, process), is let in, says when it is built, and says goodbye once it can write no more.
Decode takes as proof that the writer is gone, whichever comes first:

- it was never let in, or its socket ended before it was built;
- it said goodbye;
- its process is dead (pidfd, where both share a kernel and a process namespace). The kernel ends
  a process's memory and files before it tells (Linux, do_exit: exit_mm, exit_files, then
  exit_notify). The socket's end alone is no proof: something on the way may have cut it;
- it is in another process namespace of the same kernel, and the socket has ended. Here the way
  is assumed to be cut by nobody but the two ends;
- it runs on another kernel. It reaches this memory only through this process's own network
  endpoints, so whoever asks must have closed those before.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from kv_transfer.door import MAX_GUESTS, remaining_s, wait_for_hello

_NONCE_BYTES = 16
_HELLO = struct.Struct(f">{_NONCE_BYTES}s36sQQ")  # nonce, boot id, process namespace, process id
_LET_IN = b"I"
_BUILT = b"B"
_GOODBYE = b"E"


def boot_id() -> str:
    """Equal for two processes exactly if one running kernel serves both."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


@dataclass(slots=True)
class _Writer:
    """The sender as decode knows it: its socket, its process, what it said."""

    connection: socket.socket
    is_same_kernel: bool
    pidfd: int | None
    said: bytes = b""
    has_hung_up: bool = False
    was_reset: bool = False
    poller: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        if self.pidfd is not None:
            self.poller.register(self.pidfd, select.POLLIN)

    def hear(self) -> None:
        """Read what came, without waiting."""
        self.connection.setblocking(False)
        try:
            while data := self.connection.recv(16):
                self.said += data
            self.has_hung_up = True
        except BlockingIOError:
            return
        except ConnectionError:
            self.was_reset = True
        except OSError:
            return  # unreachable for now, or timed out: no proof of anything

    def is_gone(self) -> bool:
        self.hear()
        if not self.is_same_kernel or _GOODBYE in self.said:
            return True
        if self.has_hung_up and _BUILT not in self.said:
            return True
        if self.pidfd is None:
            return self.has_hung_up or self.was_reset
        return bool(self.poller.poll(0))

    def close(self) -> None:
        self.connection.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


class LifelineServer:
    """Decode's end: lets in one sender, the one that knows the nonce."""

    def __init__(self, host: str) -> None:
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind)
        self._listener.bind(address)
        self._listener.listen(MAX_GUESTS)
        self._host = host
        self._port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._is_closed = False
        self._writer: _Writer | None = None

    @property
    def parameters(self) -> dict[str, str]:
        """What a `Lifeline` needs, as text."""
        return {
            "lifeline_host": self._host,
            "lifeline_port": str(self._port),
            "nonce": self._nonce.hex(),
        }

    def accept(self, timeout_s: float) -> None:
        """Let the sender in and wait until it is built.

        Raises:
            OSError: it was not within `timeout_s`, or it went away.
        """
        until_s = time.monotonic() + timeout_s
        try:
            self._let_in(until_s)
        finally:
            self._listener.close()

    def is_writer_gone(self) -> bool:
        """True once closed and the writer is proven gone; see the module's docstring."""
        with self._lock:
            if not self._is_closed or (self._writer is not None and not self._writer.is_gone()):
                return False
            self._drop_writer()
            return True

    def close(self) -> None:
        """Let nobody in any more and tell the writer; idempotent."""
        with self._lock:
            self._is_closed = True
            shut_down(self._listener, socket.SHUT_RDWR)
            self._listener.close()
            if self._writer is not None:
                shut_down(self._writer.connection, socket.SHUT_WR)

    def discard(self) -> None:
        """Close all, proof or not: this process is about to give up the memory itself."""
        self.close()
        with self._lock:
            self._drop_writer()

    def _let_in(self, until_s: float) -> None:
        connection, hello = wait_for_hello(self._listener, _HELLO.size, self._is_sender, until_s)
        _, kernel, namespace, process_id = _HELLO.unpack(hello)
        is_same_kernel = kernel == boot_id().encode("ascii")
        is_same_namespace = is_same_kernel and namespace == _process_namespace()
        self._add_writer(connection, is_same_kernel, process_id if is_same_namespace else None)
        connection.settimeout(remaining_s(until_s))
        connection.sendall(_LET_IN)
        said = _receive(connection, len(_BUILT))
        with self._lock:
            if self._writer is not None:
                self._writer.said += said
        if said != _BUILT:
            raise ConnectionResetError("the other end gave up")

    def _is_sender(self, _: socket.socket, hello: bytes) -> bool:
        return hmac.compare_digest(hello[:_NONCE_BYTES], self._nonce)

    def _add_writer(
        self, connection: socket.socket, is_same_kernel: bool, process_id: int | None
    ) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                raise ConnectionAbortedError("the link was closed")
            # The pidfd is of the sender, not of a later process with its number: a sender that
            # died before was never let in and never says that it is built.
            try:
                pidfd = os.pidfd_open(process_id) if process_id is not None else None
            except OSError:
                connection.close()
                raise
            self._writer = _Writer(connection, is_same_kernel, pidfd)

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Lifeline:
    """Prefill's end. Whoever holds it may write from the moment it exists until it says goodbye."""

    def __init__(self, parameters: dict[str, str], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        address = (parameters["lifeline_host"], int(parameters["lifeline_port"]))
        self._connection = socket.create_connection(address, timeout_s)
        try:
            self._connection.sendall(
                _HELLO.pack(
                    bytes.fromhex(parameters["nonce"]),
                    boot_id().encode("ascii"),
                    _process_namespace(),
                    os.getpid(),
                )
            )
            self._connection.settimeout(remaining_s(until_s))
            _receive(self._connection, len(_LET_IN))
        except OSError:
            self._connection.close()
            raise

    def say_built(self) -> None:
        """Tell decode that pieces may come; raises OSError if it went away."""
        self._connection.sendall(_BUILT)

    def has_ended(self) -> bool:
        """True if decode gave the link up."""
        return has_ended(self._connection)

    def close(self) -> None:
        """Say goodbye: nothing can be written any more. Contract: called once."""
        self._connection.setblocking(False)
        try:
            self._connection.sendall(_GOODBYE)
        except OSError:
            pass  # decode is gone, or does not listen any more: it does not need the word
        self._connection.close()


def has_ended(connection: socket.socket) -> bool:
    """True if the other end hung up or is gone; a way that is merely broken does not count."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    except OSError:
        return False


def shut_down(connection: socket.socket, how: int) -> None:
    """Wake whoever waits on the socket, here or at the other end."""
    try:
        connection.shutdown(how)
    except OSError:
        return  # it has already ended


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        data = connection.recv(num_bytes - len(received))
        if not data:
            raise ConnectionResetError("the other end hung up")
        received += data
    return received


def _process_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
