"""Streams of links on a double of cards: what may run before what, whatever the cards do first."""

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.cuda import lane as lane_module
from kv_transfer.cuda.lane import Lane

CARD_0, CARD_1 = torch.device("cuda", 0), torch.device("cuda", 1)


class StreamDouble:
    """Work in order: names, and waits for so many entries of another stream."""

    def __init__(self, device):
        self.device = device
        self.entries = []
        self.num_done = 0
        self.is_stuck = False

    def wait_stream(self, other):
        self.entries.append((other, len(other.entries)))

    def query(self):
        return self.num_done == len(self.entries)

    def is_ready(self):
        if self.query() or self.is_stuck:
            return False
        entry = self.entries[self.num_done]
        return isinstance(entry, str) or entry[0].num_done >= entry[1]


class CardsDouble:
    """As much of torch.cuda as a lane uses; `run` is one of the orders that cards may choose."""

    def __init__(self):
        self.defaults = {card: StreamDouble(card) for card in (CARD_0, CARD_1)}
        self.streams = list(self.defaults.values())
        self.current = dict(self.defaults)
        self.device = CARD_0

    def Stream(self, device):  # noqa: N802 - as torch names it
        self.streams.append(StreamDouble(device))
        return self.streams[-1]

    def current_stream(self, device):
        return self.current[device]

    @contextmanager
    def stream(self, stream):
        before = self.device, self.current[stream.device]
        self.device, self.current[stream.device] = stream.device, stream
        yield
        self.device, self.current[stream.device] = before

    def launch(self, name, device):
        self.current[device].entries.append(name)

    def run(self, seed):
        """What was done, in an order that the streams allow."""
        draw, done = random.Random(seed), []
        while ready := [stream for stream in self.streams if stream.is_ready()]:
            stream = draw.choice(ready)
            entry = stream.entries[stream.num_done]
            stream.num_done += 1
            if isinstance(entry, str):
                done.append(entry)
        return done


@pytest.fixture
def cards(monkeypatch):
    cards = CardsDouble()
    monkeypatch.setattr(lane_module.torch, "cuda", cards)
    return cards


@pytest.mark.parametrize("seed", range(20))
def test_a_link_s_work_comes_after_what_its_thread_has_started_and_waits_for_no_other_link(
    cards, seed
):
    lane, stuck = Lane(CARD_1), Lane(CARD_1)
    with stuck.working():
        cards.launch("waits for a dead peer", CARD_1)
    stuck._streams[0].is_stuck = True
    # 1 a piece is converted on the thread's own stream, then sent on the lane
    cards.launch("convert", CARD_1)
    with lane.working():
        assert cards.device == CARD_1  # whatever the thread had before
        cards.launch("gather", CARD_1)
    assert cards.device == CARD_0
    assert not lane.is_idle()
    assert cards.run(seed) == ["convert", "gather"]
    assert lane.is_idle() and not stuck.is_idle()


def test_a_lane_over_two_cards_is_idle_when_both_are_done(cards):
    lane = Lane(CARD_0, CARD_1)
    with lane.working():
        assert cards.device == CARD_0
        cards.launch("gather", CARD_0)
        cards.launch("scatter", CARD_1)
    target = lane._streams[1]
    target.is_stuck = True
    cards.run(0)
    assert not lane.is_idle()
    target.is_stuck = False
    cards.run(0)
    assert lane.is_idle()


def test_one_card_twice_is_one_stream(cards):
    assert len(Lane(CARD_0, CARD_0)._streams) == 1


def test_a_wait_for_a_lane_ends_in_time_or_as_soon_as_it_is_idle(cards):
    lane = Lane(CARD_0)
    with lane.working():
        cards.launch("copy", CARD_0)
    assert not lane.is_idle_within(0.02)
    threading.Timer(0.02, cards.run, [0]).start()
    started_s = time.monotonic()
    assert lane.is_idle_within(5.0)
    assert time.monotonic() - started_s < 2.0
