"""Whoever knows the secret is let in, at once, however many others stand at the door."""

import socket
import threading
import time

import pytest

from kv_transfer.door import MAX_GUESTS, wait_for_hello

SECRET = b"open sesame"
SOON_S = 5.0


def is_genuine(_, hello):
    return hello == SECRET


@pytest.fixture
def listener():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0twophase-test-door")
        listener.listen(2 * MAX_GUESTS)
        yield listener


def wait(listener, seconds=SOON_S):
    return wait_for_hello(listener, len(SECRET), is_genuine, time.monotonic() + seconds)


def knock(listener, *words):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guest.connect(listener.getsockname())
    for word in words:
        guest.send(word)
    return guest


def test_a_secret_that_comes_in_two_parts_is_heard_whole(listener):
    genuine = knock(listener, SECRET[:4])
    rest = threading.Timer(0.05, genuine.send, [SECRET[4:]])
    rest.start()
    connection, said = wait(listener)
    rest.join()
    assert said == SECRET
    connection.close()
    genuine.close()


def test_what_follows_the_secret_stays_unread(listener):
    genuine = knock(listener, SECRET, b"and more")
    connection, _ = wait(listener)
    assert connection.recv(100) == b"and more"
    connection.close()
    genuine.close()


def test_more_silent_guests_than_are_kept_do_not_keep_the_genuine_one_out(listener):
    silent = [knock(listener) for _ in range(MAX_GUESTS + 4)]
    genuine = knock(listener, SECRET)
    connection, _ = wait(listener)
    # 1 all strangers were sent away
    for guest in silent:
        guest.settimeout(SOON_S)
        assert guest.recv(1) == b""
        guest.close()
    # 2 and not the one who knew
    genuine.send(b"x")
    assert connection.recv(1) == b"x"
    connection.close()
    genuine.close()


def test_a_wrong_secret_and_a_short_one_are_strangers_until_the_time_is_over(listener):
    strangers = [knock(listener, b"open barley"), knock(listener, SECRET[:5])]
    strangers[1].shutdown(socket.SHUT_WR)
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        wait(listener, 0.1)
    assert 0.1 <= time.monotonic() - started_s < SOON_S
    for guest in strangers:
        assert guest.recv(1) == b""
        guest.close()


def test_a_listener_that_is_closed_meanwhile_ends_the_wait(listener):
    closer = threading.Timer(0.05, listener.shutdown, [socket.SHUT_RDWR])
    closer.start()
    started_s = time.monotonic()
    with pytest.raises(ConnectionAbortedError, match="closed"):
        wait(listener)
    closer.join()
    assert time.monotonic() - started_s < SOON_S
