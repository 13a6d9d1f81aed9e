"""The numbers that are made of one long prompt among running streams."""

from dataclasses import replace

import pytest

from bench.interference_result import Numbers, Observation, Peer, Result, median_of, numbers_of
from bench.load import Arrival, StreamLog
from bench.machine import CpuUse
from core.completion import Completion
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases

STEP_S = 0.05


def stream_with(gaps_s, *, sent_s=0.0, first_s=1.0):
    times = [first_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    return StreamLog(sent_s, [Arrival(at_s, 1) for at_s in times])


def long_prompt(*, sent_s, token_times):
    worker = WorkerName("w")
    completion = Completion(
        request_id=RequestId("long"),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(1800, len(token_times), 0),
        phases=Phases(queue_s=0.25, prefill_s=1.5, exposed_transfer_s=0.125),
        transfer=None,
        prefill_worker=worker,
        decode_worker=worker,
        placement="",
        seed=0,
    )
    return StreamLog(sent_s, [Arrival(at_s, 1) for at_s in token_times], completion)


def frozen_round():
    """Quiet at 50 ms to 2 s, nothing for 2 s, then 50 ms again: as colocated does it."""
    gaps_s = [STEP_S] * 20 + [2.0] + [STEP_S] * 20
    streams = tuple(stream_with(gaps_s) for _ in range(8))
    long = long_prompt(sent_s=2.01, token_times=[4.0, 4.05, 4.1])
    return Observation(streams, long, CpuUse(1.5, 0.25, 0.125))


def test_the_long_gap_is_seen_in_the_prefill_and_nowhere_in_the_quiet_span():
    found = numbers_of(frozen_round())

    assert found.quiet_p50_ms == pytest.approx(50)
    assert found.quiet_p99_ms == pytest.approx(50)
    assert found.prefill_max_ms == pytest.approx(2000)
    assert found.prefill_p99_ms == pytest.approx(2000)
    assert found.max_ms == pytest.approx(2000)


def test_percentiles_of_the_whole_run_may_hide_the_long_gap():
    gaps_s = [STEP_S] * 60 + [2.0] + [STEP_S] * 140
    streams = tuple(stream_with(gaps_s) for _ in range(8))
    long = long_prompt(sent_s=4.01, token_times=[6.0, 6.05])

    found = numbers_of(Observation(streams, long, CpuUse(0, 0, 0)))

    assert found.p99_ms == pytest.approx(50)
    assert found.prefill_p99_ms == pytest.approx(2000)


def test_rates_count_the_streams_tokens_by_span():
    found = numbers_of(frozen_round())

    # The eighth token comes at 1.35 s, and 13 more of each stream before the long prompt.
    assert found.quiet_tokens_per_s == pytest.approx(8 * 13 / (2.01 - 1.35))
    assert found.prefill_tokens_per_s == pytest.approx(8 * 1 / (4.05 - 2.01))
    assert found.tokens_per_s == pytest.approx(8 * 42 / 5.0)


def test_phases_and_ttft_of_the_long_prompt_and_foreign_work_are_reported():
    found = numbers_of(frozen_round())

    assert found.ttft_s == pytest.approx(1.99)
    assert (found.queue_s, found.prefill_s, found.exposed_transfer_s) == (0.25, 1.5, 0.125)
    assert found.other_cores == 0.375


def test_an_observation_says_when_streams_ended_before_the_long_prompt_ran():
    seen = frozen_round()
    early = replace(seen, streams=(*seen.streams[1:], stream_with([STEP_S] * 20)))

    assert seen.is_covered
    assert not early.is_covered


def numbers(**changes):
    return replace(numbers_of(frozen_round()), **changes)


def test_medians_are_taken_number_by_number():
    rounds = [numbers(p99_ms=p99, ttft_s=ttft) for p99, ttft in ((1, 9), (3, 7), (2, 8))]

    found = median_of(rounds)

    assert (found.p99_ms, found.ttft_s) == (2, 8)
    assert isinstance(found, Numbers)


PEER = Peer("peer", quiet_p50_ms=25, p99_ms=100, max_ms=1000, ttft_s=4, tokens_per_s=100)


def rows_of(*, has_limits, peer, rounds):
    result = Result("setup", tuple(rounds), peer, has_limits)
    return {row.name.removeprefix("setup: "): row for row in result.rows()}


def test_rows_stand_beside_the_peer_where_it_has_the_number():
    rows = rows_of(has_limits=False, peer=PEER, rounds=[numbers()])

    assert rows["quiet ITL p50"].ratio == pytest.approx(2)
    assert rows["ITL max, whole run"].ratio == pytest.approx(2)
    assert rows["its prefill"].peer is None
    assert rows["ITL p99 during prefill"].peer is None


def test_a_split_setup_is_held_to_multiples_of_its_own_quiet_median():
    rounds = [numbers(quiet_p50_ms=50, prefill_p99_ms=100, prefill_max_ms=m) for m in (240, 330)]
    rows = rows_of(has_limits=True, peer=PEER, rounds=rounds)

    assert rows["ITL p99 during prefill"].peer == "limit: 3 x quiet p50"
    assert rows["ITL p99 during prefill"].ratio == pytest.approx(100 / 150)
    assert rows["longest gap during prefill"].ratio == pytest.approx(285 / 300)
    assert rows["longest gap of all rounds"].value == 330


def test_without_a_peer_rows_stand_alone():
    rows = rows_of(has_limits=False, peer=None, rounds=[numbers()])

    assert all(row.peer is None and row.ratio is None for row in rows.values())
