"""What port scanners and worse send to every port: noise, halves, a flood of zeros, a pickle."""

import os
import pickle
import socket
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ZEROS_BYTES = 8 << 20
SEND_TIMEOUT_S = 2.0
NUM_VISITORS = 16
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


class Mark:
    """Unpickled, it creates the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self):
        return os.mkdir, (str(self._file),)


def listening_ports(pids: list[int]) -> dict[tuple[str, int], int]:
    """Address and port of every TCP listener of these processes and their children, by process."""
    parents = [psutil.Process(pid) for pid in pids]
    processes = {p for parent in parents for p in (parent, *parent.children(recursive=True))}
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port): process.pid
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def pickle_of(marker: Path) -> bytes:
    """What makes `marker` when it is loaded."""
    return pickle.dumps(Mark(marker))


def messages(marker: Path) -> list[bytes]:
    """Everything that a stranger says, each over a connection of its own."""
    pickled = pickle_of(marker)
    return [
        os.urandom(4096),
        # The halves of a request over HTTP/1, of a frame over HTTP/2, of a TLS record.
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": ',
        H2_PREFACE + b"\x00\x40\x00\x00\x00" + struct.pack(">I", 1) + b"half",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        bytes(ZEROS_BYTES),
        pickled,
        # As multiprocessing's connections and as most homemade protocols frame it.
        struct.pack(">i", len(pickled)) + pickled,
        struct.pack("<Q", len(pickled)) + pickled,
    ]


def visit_all(addresses: Iterable[tuple[str, int]], marker: Path) -> None:
    """Say everything at every address, a few at a time."""
    with ThreadPoolExecutor(NUM_VISITORS) as visitors:
        said = [(address, message) for address in addresses for message in messages(marker)]
        list(visitors.map(visit, *zip(*said, strict=True)))


def visit(address: tuple[str, int], message: bytes) -> None:
    """Say `message` and hear what comes, until the other side ends it or shows no interest."""
    with socket.create_connection(address, SEND_TIMEOUT_S) as connection:
        try:
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.2)
            while connection.recv(4096):
                pass
        except OSError:
            return  # refused in the middle, or kept waiting: either is an answer
