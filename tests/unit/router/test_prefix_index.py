"""What the router believes of the workers' prefix caches."""

from hypothesis import given
from hypothesis import strategies as st

from router.placing.prefix_index import PrefixIndex, PromptBlocks


def num_cached(index, token_ids, worker="w", block_size=4):
    return index.num_cached_tokens(worker, PromptBlocks(token_ids), block_size)


def noted(*prompts, num_blocks=100, worker="w"):
    index = PrefixIndex()
    for token_ids in prompts:
        index.note(worker, PromptBlocks(token_ids), 4, num_blocks)
    return index


def test_full_blocks_of_a_shared_prefix_are_found_and_never_the_last_token():
    index = noted(range(10))
    assert num_cached(index, range(10)) == 8
    assert num_cached(index, range(8)) == 4
    assert num_cached(index, [0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert num_cached(index, range(1, 11)) == 0
    assert num_cached(index, range(10), "other") == 0


def test_the_same_block_after_another_prefix_is_another_block():
    index = noted([1, 1, 1, 1, 5, 5, 5, 5])
    assert num_cached(index, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert num_cached(index, [5, 5, 5, 5, 0]) == 0


def test_an_answer_is_found_behind_its_prompt_and_only_where_one_was_sent():
    index = noted(range(8))
    for worker in ("w", "other"):
        index.extend(worker, PromptBlocks(range(16)))
    assert num_cached(index, range(20)) == 16
    assert num_cached(index, range(20), "other") == 0


def test_the_oldest_is_forgotten_and_a_prefix_after_what_follows_it():
    index = noted(range(12), range(100, 104), num_blocks=3)
    assert num_cached(index, range(13)) == 8
    assert num_cached(index, range(100, 105)) == 4


def test_a_worker_that_is_gone_is_forgotten():
    index = noted(range(8))
    index.note("v", PromptBlocks(range(8)), 4, 100)
    index.keep({"v"})
    assert num_cached(index, range(9)) == 0
    assert num_cached(index, range(9), "v") == 8


prompts = st.lists(st.integers(0, 1), max_size=20)


@given(st.lists(prompts, max_size=8), prompts, st.integers(1, 5))
def test_the_longest_prefix_of_anything_noted_is_found(known, prompt, block_size):
    index = PrefixIndex()
    for token_ids in known:
        index.note("w", PromptBlocks(token_ids), block_size, 1000)

    def shared(token_ids):
        pairs = zip(token_ids, prompt, strict=False)
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return min(len(token_ids), len(prompt)) if count is None else count

    most = max((min(shared(each), len(prompt) - 1) for each in known), default=0)
    assert (
        num_cached(index, prompt, block_size=block_size) == max(most, 0) // block_size * block_size
    )


@given(st.lists(prompts, max_size=8), st.integers(1, 4))
def test_no_more_blocks_are_remembered_than_the_worker_has(known, num_blocks):
    index = noted(*known, num_blocks=num_blocks)
    assert all(len(blocks) <= num_blocks for blocks in index._blocks.values())
