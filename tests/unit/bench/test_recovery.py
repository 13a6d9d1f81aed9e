"""A stall is cut where the product's own log and phases say, and its parts add up."""

import dataclasses

import pytest

from bench.load import Arrival, StreamLog
from bench.recovery import Stall, failed_at, rows, stall_of
from core.completion import Completion
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases

LOG = """\
2026-11-30 12:00:01,250 WARNING twophase.fleet decode-0 disconnected: gone
2026-11-30 12:00:01,500 WARNING twophase.router request a: an attempt failed: gone
2026-11-30 12:00:02,000 WARNING twophase.router request b: an attempt failed: gone
2026-11-30 12:00:09,000 WARNING twophase.router request a: an attempt failed: again
""".splitlines()


def test_the_first_failure_of_each_request_is_found_in_the_log():
    found = failed_at(LOG, offset_s=0.0)
    assert list(found) == ["a", "b"]
    assert found["b"] - found["a"] == pytest.approx(0.5)


def a_log(recovery_s: float, *arrivals: float) -> StreamLog:
    zero = {field.name: 0.0 for field in dataclasses.fields(Phases)}
    changes = {"recovery_s": recovery_s, "prefill_s": 0.2, "queue_s": 0.1, "reserve_s": 0.05}
    completion = Completion(
        RequestId("a"),
        FinishReason.LENGTH,
        Usage(1, len(arrivals)),
        Phases(**(zero | changes | {"place_s": 0.5})),
        transfer=None,
        prefill_worker=WorkerName("p"),
        decode_worker=WorkerName("d"),
        placement="",
        seed=0,
    )
    return StreamLog(10.0, [Arrival(at_s, 1) for at_s in arrivals], completion)


def test_tokens_on_their_way_at_the_kill_do_not_end_the_stall():
    stall = stall_of(a_log(2.0, 11.9, 12.01, 13.0, 13.1), killed_s=12.0, noticed_s=12.25)
    assert stall == Stall(
        pytest.approx(0.25),
        pytest.approx(0.25),
        pytest.approx(0.5),
        pytest.approx(0.05),
        pytest.approx(0.1),
        pytest.approx(0.2),
    )
    assert stall.total_s == pytest.approx(1.0)
    assert stall.rest_s == pytest.approx(0.15)


def test_the_wait_is_never_negative_though_messages_take_time():
    assert stall_of(a_log(1.0, 12.6), killed_s=12.0, noticed_s=12.25).wait_s == 0.0


def test_the_shares_of_the_three_parts_add_up():
    stalls = [Stall(0.1, 0.2, 0.7, 0.1, 0.0, 0.3), Stall(0.3, 0.0, 1.2, 0.2, 0.1, 0.5)]
    found = {row.name: row.value for row in rows(stalls)}
    shares = [found[f"{part}, share"] for part in ("detection", "wait for workers", "recompute")]
    assert sum(shares) == pytest.approx(100.0)
    assert found["kill to next token, median"] == pytest.approx(1250.0)
    assert found["kill to next token, worst"] == pytest.approx(1500.0)
