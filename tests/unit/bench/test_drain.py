"""The pause of a stream is its longest gap after the stop, and only of one that moved."""

from bench.drain import pauses_of, rows
from bench.load import Arrival, StreamLog
from core.completion import Completion
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases


def a_log(num_resumed_tokens: int, *arrivals: float) -> StreamLog:
    completion = Completion(
        RequestId("a"),
        FinishReason.LENGTH,
        Usage(1, len(arrivals)),
        Phases(),
        transfer=None,
        prefill_worker=WorkerName("p"),
        decode_worker=WorkerName("d"),
        placement="",
        seed=0,
        num_resumed_tokens=num_resumed_tokens,
    )
    return StreamLog(0.0, [Arrival(at_s, 1) for at_s in arrivals], completion)


def test_gaps_before_the_stop_and_streams_that_stayed_do_not_count():
    logs = [a_log(3, 1.0, 9.0, 9.5, 12.0, 12.5), a_log(0, 1.0, 30.0), a_log(2, 8.0, 10.25, 10.5)]
    assert pauses_of(logs, stopped_s=10.0) == [2.5, 2.25]


def test_a_stream_that_was_over_at_the_stop_has_no_pause():
    assert pauses_of([a_log(3, 1.0, 2.0)], stopped_s=10.0) == []


def test_median_and_worst_are_told():
    assert [row.value for row in rows("migrate", [0.1, 0.2, 0.6])] == [200.0, 600.0]
