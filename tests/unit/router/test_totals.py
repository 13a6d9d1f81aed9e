"""Where KV caches came from, summed over requests."""

from core.completion import Completion
from core.errors import LayoutMismatch, PeerLost, TransferFailed, TransferFailure
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases, TransferReport
from core.worker import KvTotals
from router.placing.placement import Placement
from router.telemetry.totals import KvCounters


def completion(usage, transfer=None):
    return Completion(
        request_id=RequestId("r"),
        finish_reason=FinishReason.STOP,
        usage=usage,
        phases=Phases(),
        transfer=transfer,
        prefill_worker=WorkerName("p"),
        decode_worker=WorkerName("d"),
        placement="",
        seed=0,
    )


def test_each_source_is_counted_and_a_failed_handoff_apart():
    counters = KvCounters()
    transfer = TransferReport("shm", 1, 1, 0.0, 0.0)

    counters.finished(completion(Usage(10, 1, 0, 4, num_transferred_tokens=6), transfer))
    counters.finished(completion(Usage(7, 1, 0, 0, num_local_prefill_tokens=7)))
    for error in (
        TransferFailed(TransferFailure.CHECKSUM, "a test"),
        LayoutMismatch("dtype"),
        LayoutMismatch("dtype"),
    ):
        counters.attempt_failed(Placement("p", "d", "a test"), error)
    counters.attempt_failed(Placement(None, "d", "a test"), PeerLost("d", "a test"))

    assert counters.totals == KvTotals(
        num_transferred_tokens=6,
        num_decode_cached_tokens=4,
        num_local_prefill_tokens=7,
        num_sealed_handoffs=1,
        num_failed_handoffs=1,
    )
    assert counters.failures == {
        ("p", "d", "checksum"): 1,
        ("p", "d", "layout_mismatch"): 2,
        ("", "d", "peer_lost"): 1,
    }
