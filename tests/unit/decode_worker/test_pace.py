"""How fast an answer grows, and what ran in its longest gap."""

from core.timeline import DecodeReport
from decode_worker.pace import Pace
from decode_worker.step_log import MAX_STEPS, StepFacts, StepLog


def decode_step(ended_s, num_sequences=1, num_history_tokens=10, prompts=()):
    return StepFacts(ended_s, 0.25, num_sequences, num_history_tokens, prompts)


def prompt_step(ended_s, *prompts):
    return decode_step(ended_s, 0, 0, prompts)


def test_means_are_over_the_steps_that_made_its_tokens():
    log, pace = StepLog(), Pace(began_s=1.0)
    for index, (num_sequences, history) in enumerate([(1, 10), (3, 40)], start=1):
        log.add(decode_step(1.0 + index, num_sequences, history))
        pace.token(index, log)
    report = pace.report(slot_wait_s=0.5)
    assert (report.slot_wait_s, report.decode_s, report.step_s) == (0.5, 2.0, 0.5)
    assert (report.mean_num_sequences, report.mean_num_history_tokens) == (2.0, 25.0)
    assert report.prompt_gap_s == 0.0


def test_the_longest_gap_names_prompts_of_steps_in_which_it_took_no_part():
    log, pace = StepLog(), Pace(began_s=0.0)
    log.add(decode_step(1.0))
    pace.token(1, log)
    log.add(prompt_step(2.0, ("a", 100)))
    log.add(prompt_step(3.0, ("b", 300), ("a", 50)))
    log.add(decode_step(3.5, num_sequences=2))
    pace.token(2, log)
    log.add(decode_step(4.0))
    pace.token(3, log)
    report = pace.report(0.0)
    gap = report.longest_gap
    assert (gap.index, gap.gap_s, gap.step_s, gap.num_sequences) == (2, 2.5, 0.75, 2)
    assert (gap.num_prompt_tokens, gap.prompts) == (450, ("b", "a"))
    assert report.prompt_gap_s == 2.5


def test_a_prompt_before_the_gap_or_after_it_is_not_in_it():
    log, pace = StepLog(), Pace(began_s=2.0)
    log.add(prompt_step(1.0, ("before", 9)))
    log.add(decode_step(3.0))
    pace.token(1, log)
    assert pace.report(0.0).longest_gap.prompts == ()
    assert pace.report(0.0).prompt_gap_s == 0.0


def test_a_gap_over_more_steps_than_are_kept_names_the_last():
    log, pace = StepLog(), Pace(began_s=0.0)
    for number in range(1, 2 * MAX_STEPS):
        log.add(prompt_step(number, (f"p{number}", number)))
    log.add(decode_step(200.0))
    pace.token(1, log)
    gap = pace.report(0.0).longest_gap
    assert gap.gap_s == 200.0
    assert gap.prompts[0] == f"p{2 * MAX_STEPS - 1}"


def test_an_answer_without_a_token_of_decode_took_no_time():
    assert Pace(began_s=3.0).report(0.0) == DecodeReport(0.0, 0.0)
