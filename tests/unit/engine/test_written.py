"""Who waits for a card's work is told in order, after it, and before the step is over."""

import threading

import pytest

from engine.device.written import Written


def test_each_is_told_after_its_own_wait_in_the_order_of_the_step():
    order = []
    written = Written()
    for index in range(3):
        written.when(
            lambda i=index: order.append(("wait", i)), lambda i=index: order.append(("tell", i))
        )
    written.drain()
    assert order == [(word, i) for i in range(3) for word in ("wait", "tell")]


def test_the_thread_that_steps_is_not_held_up_until_it_drains():
    gate, told = threading.Event(), []
    written = Written()
    written.when(lambda: gate.wait(10.0), lambda: told.append(threading.current_thread().name))
    assert told == []
    gate.set()
    written.drain()
    assert told == ["kv-written_0"]


def test_a_card_that_fails_tells_nobody_and_fails_the_step_once():
    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    told = []
    written = Written()
    written.when(fail, lambda: told.append(1))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        written.drain()
    assert told == []
    written.drain()
