"""What the load client makes of the messages that it got."""

import random

import pytest

from bench.load import Arrival, Gap, StreamLog, random_prompt, stream
from core.completion import Chunk


def log_of(*arrivals: tuple[float, int]) -> StreamLog:
    return StreamLog(10.0, [Arrival(at_s, num_tokens) for at_s, num_tokens in arrivals])


def test_each_token_after_the_first_has_one_gap():
    log = log_of((11.0, 1), (11.5, 1), (12.25, 1))

    assert [gap.seconds for gap in log.gaps()] == [0.5, 0.75]
    assert log.ttft_s == 1.0


def test_tokens_of_one_message_arrived_together():
    log = log_of((11.0, 2), (12.0, 3))

    assert [gap.seconds for gap in log.gaps()] == [0.0, 1.0, 0.0, 0.0]
    assert len(log.gaps()) == log.num_tokens - 1


def test_the_arrival_of_a_token_is_that_of_its_message():
    log = log_of((11.0, 1), (12.0, 3), (13.0, 1))

    assert [log.arrival_of(index) for index in range(5)] == [11.0, 12.0, 12.0, 12.0, 13.0]
    with pytest.raises(IndexError, match="token 5 of a stream of 5"):
        log.arrival_of(5)


def test_a_rate_counts_each_token_in_one_of_two_adjoining_spans():
    log = log_of((11.0, 1), (12.0, 2), (13.0, 4))

    assert log.num_tokens_between(10.0, 12.0) == 3
    assert log.num_tokens_between(12.0, 13.0) == 4


@pytest.mark.parametrize(
    ("span", "expected"),
    [((0.0, 1.0), False), ((0.0, 1.1), True), ((1.4, 1.6), True), ((2.0, 3.0), False)],
)
def test_a_gap_overlaps_a_span_that_holds_a_part_of_it(span, expected):
    assert Gap(1.0, 2.0).overlaps(*span) is expected


class ScriptedClient:
    """Answers as AsyncClient does, from a list."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.asked = None

    async def generate(self, prompt, sampling, *, timeout_s):
        self.asked = (prompt, sampling, timeout_s)
        for chunk in self.chunks:
            yield chunk


async def test_a_stream_notes_messages_with_tokens_and_tells_of_each():
    chunks = [Chunk("a", (1,)), Chunk("", (2, 3)), Chunk("", (), completion="the end")]
    client, log, seen = ScriptedClient(chunks), StreamLog(), []

    await stream(
        client,
        (7, 8),
        log,
        max_tokens=3,
        timeout_s=9.0,
        on_arrival=lambda: seen.append(log.num_tokens),
    )

    prompt, sampling, timeout_s = client.asked
    assert (prompt, sampling.max_tokens, timeout_s) == ((7, 8), 3, 9.0)
    assert sampling.ignore_eos
    assert seen == [1, 3]
    assert log.completion == "the end"
    assert log.sent_s <= log.arrivals[0].at_s <= log.arrivals[1].at_s


def test_prompts_of_one_generator_differ_and_come_again_with_its_seed():
    generator = random.Random(5)
    first, second = (random_prompt(generator, 64, 49_152) for _ in range(2))

    assert not set(zip(first, first[1:], strict=False)) & set(zip(second, second[1:], strict=False))
    assert first == random_prompt(random.Random(5), 64, 49_152)
    assert all(100 <= token_id < 49_152 for token_id in first)
