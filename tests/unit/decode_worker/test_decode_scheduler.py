"""What one step of a decode worker computes, in each mode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Mode
from decode_worker.scheduler import Prompt, Scheduler, Share

running_ids = st.integers(0, 12).map(lambda number: [f"run-{place}" for place in range(number)])
prompt_lists = st.lists(st.integers(1, 3000), max_size=8).map(
    lambda lengths: [Prompt(f"prompt-{place}", tokens) for place, tokens in enumerate(lengths)]
)
budgets, slots = st.integers(1, 600), st.integers(1, 8)
modes = st.sampled_from(Mode)


def schedule(mode, running, prompts, *, budget=8, num_slots=4):
    scheduler = Scheduler(mode, max_batch_tokens=budget, max_num_sequences=num_slots)
    return scheduler.schedule(running, prompts)


def shares_of(*pairs):
    return tuple(Share(*pair) for pair in pairs)


@pytest.mark.parametrize("mode", Mode)
def test_each_running_sequence_gets_one_token_up_to_the_slots(mode):
    assert schedule(mode, list("abcdef"), []) == shares_of(*((name, 1) for name in "abcd"))


def test_chunked_mixes_decodes_first_then_the_oldest_prompts():
    prompts = [Prompt("p", 3), Prompt("q", 9)]
    expected = shares_of(("a", 1), ("b", 1), ("p", 3), ("q", 3))
    assert schedule(Mode.CHUNKED, ["a", "b"], prompts) == expected


def test_chunked_reads_prompts_even_if_decodes_fill_the_budget():
    shares = schedule(Mode.CHUNKED, list("abcd"), [Prompt("p", 9)], budget=2)
    assert shares[-1] == Share("p", 1)


def test_colocated_reads_whole_prompts_while_running_sequences_wait():
    prompts = [Prompt("p", 3), Prompt("q", 5), Prompt("r", 1)]
    assert schedule(Mode.COLOCATED, ["a"], prompts) == shares_of(("p", 3), ("q", 5))


def test_colocated_reads_a_prompt_above_the_budget_alone():
    prompts = [Prompt("p", 500), Prompt("q", 1)]
    assert schedule(Mode.COLOCATED, ["a"], prompts) == shares_of(("p", 500))


@given(modes, running_ids, prompt_lists, budgets, slots)
def test_a_step_is_empty_only_when_there_is_nothing_to_do(mode, running, prompts, budget, slots):
    shares = schedule(mode, running, prompts, budget=budget, num_slots=slots)
    assert bool(shares) == bool(running or prompts)


@given(modes, running_ids, prompt_lists, budgets, slots)
def test_nobody_gets_two_shares_or_more_than_is_left(mode, running, prompts, budget, slots):
    shares = schedule(mode, running, prompts, budget=budget, num_slots=slots)
    left = dict.fromkeys(running, 1) | {p.request_id: p.num_remaining_tokens for p in prompts}
    assert len({share.request_id for share in shares}) == len(shares)
    assert all(1 <= share.num_tokens <= left[share.request_id] for share in shares)


@given(running_ids, prompt_lists.filter(bool), budgets, slots)
def test_chunked_never_stops_a_running_sequence_and_keeps_its_budget(
    running, prompts, budget, slots
):
    shares = schedule(Mode.CHUNKED, running, prompts, budget=budget, num_slots=slots)
    num_decodes = min(len(running), slots)
    assert [share.request_id for share in shares[:num_decodes]] == running[:num_decodes]
    chunk_tokens = sum(share.num_tokens for share in shares[num_decodes:])
    total = sum(prompt.num_remaining_tokens for prompt in prompts)
    assert chunk_tokens == min(max(budget - num_decodes, 1), total)


@given(running_ids, prompt_lists.filter(bool), budgets, slots)
def test_colocated_takes_the_oldest_prompts_whole(running, prompts, budget, slots):
    shares = schedule(Mode.COLOCATED, running, prompts, budget=budget, num_slots=slots)
    taken = [(p.request_id, p.num_remaining_tokens) for p in prompts[: len(shares)]]
    assert [(share.request_id, share.num_tokens) for share in shares] == taken
    assert len(shares) == 1 or sum(share.num_tokens for share in shares) <= budget
