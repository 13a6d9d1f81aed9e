"""What the page shows, made from facts: complete, bounded, and nothing that JSON cannot hold."""

import json
from dataclasses import asdict, replace

import pytest

from core.listing import ListedRequest, ListedWorker, WorkerState
from core.request_state import RequestState
from core.signals import Demand, Signals
from core.timeline import Phases
from core.worker import KvTotals, LinkStatus, Role, StuckWorker
from router.page.snapshot import MAX_REQUESTS, MAX_WORKERS, Facts, Judged, snapshot_of
from router.page.span import open_phase, spans_so_far
from router.telemetry.decisions import MAX_CHARACTERS, Decisions
from router.telemetry.history import Ended
from router.telemetry.recent import SLOT_S, Recent
from router.timeline.record import Record
from tests.unit.core.test_diagnosis import HEALTHY, delayed
from tests.unit.router.doubles import make_info, make_status

RECORD = Record(0.0, 0.0)
LINK = LinkStatus("decode-0", "shm", "same host", 1000, latency_s=0.001, bytes_per_s=5e6)


def listed_worker(name, role):
    return ListedWorker(name, role, f"{name}:1", "1", WorkerState.READY, 1, 10, 64, 16, 4)


def worker(name, role=Role.DECODE, **changes):
    status = make_status(make_info(name, role))
    return listed_worker(name, role), replace(status, **changes)


def listed_request(name="r", state=RequestState.DECODING):
    return ListedRequest(name, state, 2.0, 10.0, 500, 3, "prefill-0", "decode-0", 1)


def facts(**changes):
    recent = Recent()
    recent.first_tokens(0.5, num_prompt=500, num_output=1, now_s=90.0)
    recent.more_tokens(0.02, num_output=4, now_s=90.1)
    given = {
        "now_s": 100.0,
        "model": "tiny",
        "mode": "disaggregated",
        "is_ready": True,
        "is_scaled": False,
        "workers": [worker("decode-0"), worker("prefill-0", Role.PREFILL, links=(LINK,))],
        "stuck": [],
        "demand": Demand(),
        "kv": KvTotals(),
        "num_running": 1,
        "running": [(listed_request(), HEALTHY)],
        "ended": [Ended(HEALTHY, 90.0, RECORD)],
        "judged": Judged.of([HEALTHY] * 5, 300.0),
        "slots": recent.slots(100.0),
        "lately": recent.lately(5, 100.0),
        "lately_s": 5 * SLOT_S,
        "decisions": [],
    }
    return Facts(**(given | changes))


def test_prefill_comes_first_with_blocks_that_add_up_and_links_with_their_bandwidth():
    blocks = {"num_total_blocks": 20, "num_free_blocks": 11, "num_cached_blocks": 4}
    blocks |= {"num_used_blocks": 7, "num_quarantined_blocks": 2}
    signals = Signals(queue_wait_p50_s=0.1, queue_wait_p95_s=0.4, step_s=0.03)
    workers = [worker("decode-0", signals=signals, **blocks), *facts().workers[1:]]
    told = snapshot_of(facts(workers=workers))
    assert [one.name for one in told.workers] == ["prefill-0", "decode-0"]
    held = told.workers[1].blocks
    parts = held.num_used + held.num_quarantined + held.num_cached + held.num_free
    assert parts == held.num_total == 20
    assert (told.workers[1].queue_wait_p95_s, told.workers[1].step_s) == (0.4, 0.03)
    link = told.links[0]
    assert (link.sender, link.receiver, link.backend) == ("prefill-0", "decode-0", "shm")
    assert (link.num_bytes, link.bytes_per_s) == (1000, 5e6)


def test_a_link_between_decode_workers_is_shown_once_as_its_sender_tells_of_it():
    received = replace(LINK, peer="decode-1", latency_s=None, bytes_per_s=None)
    workers = [worker("decode-1", links=(LINK,)), worker("decode-0", links=(received,))]
    told = snapshot_of(facts(workers=workers))
    assert [(link.sender, link.receiver) for link in told.links] == [("decode-1", "decode-0")]


def test_a_worker_that_has_said_nothing_is_shown_without_counts():
    told = snapshot_of(facts(workers=[(listed_worker("decode-0", Role.DECODE), None)]))
    assert told.workers[0].blocks is told.workers[0].num_running is None


def test_prompt_tokens_and_output_tokens_are_never_mixed():
    rates = snapshot_of(facts()).rates
    assert rates.prompt_tokens_per_s == 500 / (5 * SLOT_S)
    assert rates.output_tokens_per_s == 5 / (5 * SLOT_S)
    assert sum(rates.num_prompt_tokens) == 500 and sum(rates.num_output_tokens) == 5
    assert rates.ttft.lately.p50_s == pytest.approx(0.5, rel=0.03)
    assert [value for value in rates.itl.p99_s if value is not None] == [rates.itl.lately.p99_s]


def test_an_ended_request_names_what_was_slow_and_its_spans_add_up():
    told = snapshot_of(
        facts(ended=[Ended(delayed("queue"), 70.0, RECORD), Ended(HEALTHY, 60.0, RECORD)])
    )
    assert [past.slow for past in told.ended] == [("queue",), ()]
    assert told.ended[0].age_s == 30.0
    for past in told.ended:
        assert sum(seconds for _, seconds in past.spans) == pytest.approx(past.total_s, abs=1e-4)


def test_the_page_is_bounded_whatever_the_cluster():
    many = [worker(f"prefill-{n}", Role.PREFILL, links=(LINK,) * 3) for n in range(200)]
    running = [(listed_request(f"r{n}"), None) for n in range(1000)]
    decisions = Decisions()
    for number in range(1000):
        decisions.add(f"{number}" + "x" * 5000, 50.0)
    told = snapshot_of(
        facts(
            workers=many,
            running=running,
            num_running=1000,
            ended=[Ended(HEALTHY, 1.0, RECORD)] * 1000,
            stuck=[StuckWorker("decode-0", "a:1", "silent", 1.0)] * 1000,
            decisions=decisions.latest(),
            is_scaled=True,
        )
    )
    assert (told.num_workers, len(told.workers)) == (200, MAX_WORKERS)
    assert told.num_links == 600
    assert (told.num_running, len(told.running), len(told.ended)) == (
        1000,
        MAX_REQUESTS,
        MAX_REQUESTS,
    )
    age_s, sentence = told.scaling.decisions[0]
    assert (age_s, sentence[:4], len(sentence)) == (50.0, "999x", MAX_CHARACTERS)
    assert len(json.dumps(asdict(told), allow_nan=False)) < 120_000


def test_all_of_it_is_json_also_of_an_empty_cluster():
    nothing = {"workers": [], "running": [], "num_running": 0, "ended": []}
    idle = Recent()
    measured = {"slots": idle.slots(100.0), "lately": idle.lately(5, 100.0)}
    empty = facts(judged=Judged.of((), 300.0), **nothing, **measured)
    for told in (snapshot_of(facts()), snapshot_of(empty)):
        assert json.loads(json.dumps(asdict(told), allow_nan=False))["model"] == "tiny"


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        *((RequestState.RECEIVED, "place"), (RequestState.RESERVING, "reserve")),
        *((RequestState.PREFILLING, "queue_or_prefill"), (RequestState.DECODING, "decode")),
        *((RequestState.FAILED, "recovery"), (RequestState.FINISHED, "delivery")),
    ],
)
def test_what_no_report_has_told_yet_is_the_phase_that_the_request_is_in(state, phase):
    known = replace(HEALTHY, transfer=None, phases=Phases(tokenize_s=0.25, total_s=2.0))
    assert open_phase(known, state) == phase
    assert spans_so_far(known, state) == (("tokenize", 0.25), (phase, 1.75))


def test_a_request_whose_transfer_is_told_waits_for_a_slot():
    assert open_phase(HEALTHY, RequestState.TRANSFERRING) == "slot_wait"
    known = replace(HEALTHY, transfer=None)
    assert open_phase(known, RequestState.TRANSFERRING) == "exposed_transfer"
    assert open_phase(None, RequestState.RECEIVED) == "tokenize"
