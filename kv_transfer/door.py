"""Lets in the one who knows the secret, whoever else knocks.

A link's listener is open to everybody who can reach it: port scanners, health checks, a sender of
another link that mixed up its address. `wait_for_hello` hears all of them at once, so that one who
stays silent, hangs up or talks nonsense costs the genuine sender no time. Knows nothing of links.
"""

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

# Whoever knocks while so many are silent takes the place of the one who came first.
MAX_GUESTS = 16


@dataclass(slots=True)
class _Guest:
    connection: socket.socket
    said: bytes = b""


def wait_for_hello(
    listener: socket.socket,
    num_bytes: int,
    is_genuine: Callable[[socket.socket, bytes], bool],
    until_s: float,
) -> tuple[socket.socket, bytes]:
    """The first connection whose first `num_bytes` bytes are genuine, and these bytes.

    The connection is non-blocking; those of strangers are closed.

    Raises:
        TimeoutError: nobody genuine came until `until_s` (monotonic).
        OSError: the listener was closed meanwhile.

    Contract: may block until `until_s`; makes `listener` non-blocking; caller keeps it.
    """
    guests: dict[int, _Guest] = {}
    poller = select.poll()
    listener.setblocking(False)
    door = listener.fileno()
    poller.register(listener, select.POLLIN)
    try:
        while True:
            for fd, event in poller.poll(1e3 * remaining_s(until_s)):
                if fd == door and event & ~select.POLLIN:
                    raise ConnectionAbortedError("the listener was closed")
                if fd == door:
                    _open_to_one(listener, guests, poller)
                elif fd in guests and (end := _hear(guests[fd], num_bytes)) is not None:
                    guest = guests.pop(fd)
                    poller.unregister(fd)
                    if end and is_genuine(guest.connection, guest.said):
                        return guest.connection, guest.said
                    guest.connection.close()
    finally:
        for guest in guests.values():
            guest.connection.close()


def remaining_s(until_s: float) -> float:
    """Seconds until `until_s`; raises TimeoutError if there are none."""
    seconds = until_s - monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _open_to_one(listener: socket.socket, guests: dict[int, _Guest], poller: "select.poll") -> None:
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return  # it went away before its turn
    connection.setblocking(False)
    if len(guests) == MAX_GUESTS:
        oldest = next(iter(guests))
        poller.unregister(oldest)
        guests.pop(oldest).connection.close()
    guests[connection.fileno()] = _Guest(connection)
    poller.register(connection, select.POLLIN)


def _hear(guest: _Guest, num_bytes: int) -> bool | None:
    """True once it said `num_bytes` bytes, False if it never will, None if that is still open."""
    try:
        data = guest.connection.recv(num_bytes - len(guest.said))
    except BlockingIOError:
        return None
    except OSError:
        return False
    guest.said += data
    if not data:
        return False
    return True if len(guest.said) == num_bytes else None
