"""Which phase was slow: one at a time, by name; none where all is well."""

from dataclasses import replace

import pytest

from core.completion import Completion
from core.diagnosis import Usual, explain, spreads, troubles, usual_of
from core.finding import Symptom
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import DecodeReport, Gap, Phases, TransferReport

NUM_PROMPT, NUM_OUTPUT = 500, 41
HEALTHY_PHASES = Phases(
    tokenize_s=0.002,
    place_s=0.001,
    reserve_s=0.003,
    queue_s=0.02,
    prefill_s=0.5,
    exposed_transfer_s=0.004,
    slot_wait_s=0.02,
    decode_s=1.2,
    delivery_s=0.001,
    total_s=1.76,
    time_to_first_token_s=0.53,
)
GAP = Gap(7, 0.04, 0.03, 4, 2000, 0, ())
HEALTHY = Completion(
    request_id=RequestId("healthy"),
    finish_reason=FinishReason.LENGTH,
    usage=Usage(NUM_PROMPT, NUM_OUTPUT, 0, 0, NUM_PROMPT, 0),
    phases=HEALTHY_PHASES,
    transfer=TransferReport("shm", 23_000_000, 12, 0.3, 0.004),
    prefill_worker=WorkerName("prefill-0"),
    decode_worker=WorkerName("decode-0"),
    placement="least wait",
    seed=0,
    decode=DecodeReport(0.02, 1.2, 1.1, 4.0, 2000.0, 0.0, GAP),
)
USUAL = usual_of([HEALTHY] * 5)


def delayed(phase, seconds=1.0):
    """A healthy request of which one phase took so much longer."""
    phases = HEALTHY.phases
    longer = {"total_s": phases.total_s + seconds}
    if phase != "unaccounted":
        longer[f"{phase}_s"] = getattr(phases, f"{phase}_s") + seconds
    completion = replace(HEALTHY, phases=replace(phases, **longer))
    if phase == "recovery":
        completion = replace(completion, failures=("prefill-0 to decode-0: it was killed",))
    if phase == "decode":
        gap = replace(GAP, gap_s=GAP.gap_s + seconds)
        report = replace(HEALTHY.decode, decode_s=1.2 + seconds, longest_gap=gap)
        completion = replace(completion, decode=report)
    return completion


def with_gap(**changes):
    gap = replace(GAP, gap_s=1.04, **changes)
    report = replace(HEALTHY.decode, decode_s=2.2, longest_gap=gap)
    return replace(delayed("decode"), decode=report)


PHASES = [name for name, _ in HEALTHY_PHASES.items()] + ["unaccounted"]


def test_nothing_is_named_where_all_is_well():
    assert explain(HEALTHY, USUAL) == []


@pytest.mark.parametrize("usual", [USUAL, Usual()])
@pytest.mark.parametrize("phase", PHASES)
def test_a_second_more_names_the_phase_that_took_it_and_no_other(phase, usual):
    findings = explain(delayed(phase), usual)
    if phase == "prefill" and usual == Usual():
        assert findings == []  # nobody knows what a prompt takes here
        return
    assert [finding.phase for finding in findings] == [phase]
    assert findings[0].seconds >= 1.0
    assert findings[0].evidence and findings[0].advice


def test_an_answer_that_moved_from_a_worker_that_stopped_suffered_from_no_failure():
    moved = replace(delayed("recovery", 30.0), failures=(), num_resumed_tokens=12)
    assert explain(moved, USUAL) == []
    assert troubles([moved, HEALTHY]) == []


@pytest.mark.parametrize(
    ("phase", "symptom"),
    [("queue", Symptom.FIRST_TOKEN), ("slot_wait", Symptom.LATER_TOKENS)],
)
def test_the_symptom_is_what_the_client_sees(phase, symptom):
    assert explain(delayed(phase), USUAL)[0].symptom is symptom


def test_a_prompt_of_ten_times_the_length_may_take_ten_times_as_long():
    usage = replace(HEALTHY.usage, num_prompt_tokens=10 * NUM_PROMPT)
    phases = replace(HEALTHY.phases, prefill_s=5.0, total_s=6.26)
    assert explain(replace(HEALTHY, usage=usage, phases=phases), USUAL) == []


def test_cached_tokens_are_no_work():
    usage = replace(HEALTHY.usage, num_prefill_cached_tokens=480)
    completion = replace(HEALTHY, usage=usage)
    (finding,) = explain(completion, USUAL)
    assert finding.phase == "prefill"
    assert "32 tokens were computed (480 were cached)" in finding.evidence


def test_a_gap_names_the_prompts_that_were_read_in_it():
    completion = with_gap(num_prompt_tokens=1800, prompts=("long", "short"), step_s=1.0)
    (finding,) = explain(completion, USUAL)
    assert "token 7 came 1.04 s after" in finding.evidence
    assert "1800 prompt tokens of long, short" in finding.evidence
    assert "mode disaggregated" in finding.advice


def test_a_gap_without_prompts_tells_the_step_from_the_worker_that_stood_still():
    (in_step,) = explain(with_gap(step_s=1.0), USUAL)
    (between,) = explain(with_gap(step_s=0.03), USUAL)
    assert "one step of 4 sequences took 1.00 s" in in_step.evidence
    assert "stood still between two steps" in between.advice


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"prompt_gap_s": 3.0}, "prompts of others were read"),
        ({"mean_num_history_tokens": 9000.0}, "reads more history than usual"),
        ({"mean_num_sequences": 16.0}, "larger batches than usual"),
        ({}, "was slower than usual at the same work"),
    ],
)
def test_slow_tokens_without_one_long_gap_are_told_apart_by_what_the_steps_held(changes, advice):
    phases = replace(HEALTHY.phases, decode_s=4.8, total_s=5.36)
    gap = replace(GAP, gap_s=0.13)
    report = replace(HEALTHY.decode, decode_s=4.8, longest_gap=gap, **changes)
    (finding,) = explain(replace(HEALTHY, phases=phases, decode=report), USUAL)
    assert finding.phase == "decode"
    assert finding.usual_s == pytest.approx(1.2)
    assert advice in finding.advice


def test_of_an_answer_that_went_on_elsewhere_only_its_waits_are_judged():
    resumed = replace(delayed("decode"), num_resumed_tokens=30)
    assert explain(resumed, USUAL) == []
    assert [f.phase for f in explain(replace(delayed("queue"), num_resumed_tokens=3), USUAL)] == [
        "queue"
    ]
    assert usual_of([replace(HEALTHY, num_resumed_tokens=3)] * 9) == Usual()


def test_a_further_answer_waits_for_the_first_and_not_for_workers():
    further = replace(delayed("place"), request_id=RequestId("healthy~n1"))
    (finding,) = explain(further, USUAL)
    assert "until the first answer" in finding.evidence
    beside = with_gap(num_prompt_tokens=9, prompts=("healthy",), step_s=1.0)
    assert "9 tokens of its own prompt" in explain(beside, USUAL)[0].evidence


def test_the_worst_comes_first():
    both = delayed("queue", 1.0)
    both = replace(both, phases=replace(both.phases, place_s=2.0, total_s=both.phases.total_s + 2))
    assert [finding.phase for finding in explain(both, USUAL)] == ["place", "queue"]


def test_what_is_usual_needs_enough_requests_and_is_their_median():
    assert usual_of([HEALTHY] * 4) == Usual()
    assert usual_of([HEALTHY] * 5 + [delayed("prefill", 9.0)] * 4).prefill_token_s == 0.001


def test_the_fleets_troubles_are_summed_by_phase_with_the_worst_named():
    slow = replace(delayed("queue", 2.0), request_id=RequestId("slow"))
    found = troubles([HEALTHY] * 8 + [delayed("queue"), slow, delayed("place", 1.0)])
    assert [(t.worst.phase, t.num_requests) for t in found] == [("queue", 2), ("place", 1)]
    assert found[0].worst_request_id == "slow"
    assert found[0].seconds == pytest.approx(1.02 + 2.02)
    assert troubles([HEALTHY] * 8) == []


def test_each_phase_is_spread_over_the_requests():
    assert spreads([]) == []
    by_phase = {spread.phase: spread for spread in spreads([HEALTHY] * 19 + [delayed("queue")])}
    assert list(by_phase) == PHASES
    queue = by_phase["queue"]
    assert (queue.p50_s, queue.p95_s, queue.max_s) == (0.02, 1.02, 1.02)
