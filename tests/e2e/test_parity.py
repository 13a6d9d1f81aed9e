"""Each mode and transport gives the tokens of an independent implementation."""

import asyncio
from pathlib import Path

import pytest

from bench.parity import SETUPS, compare, load_reference
from core.completion import Completion
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import Client, Sampling

REFERENCE = Path(__file__).parent.parent / "data" / "greedy_float32.jsonl"
KV = ("decode.kv_cache=256MiB",)
BYTES_PER_TOKEN = 46_080
BLOCK_SIZE = 16
# Of the prompts that the suite asks alone: the shortest, a chat, the longest that share a prefix.
ALONE = {"p06", "c06", "x01", "x02"}

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.mark.case("B-024", "B-171")
@pytest.mark.parametrize("num_at_once", [1, 8])
@pytest.mark.parametrize(("name", "overrides"), SETUPS)
def test_tokens_equal_the_reference(
    smollm2_directory: Path,
    start_cluster: StartCluster,
    name: str,
    overrides: tuple[str, ...],
    num_at_once: int,
    is_thorough: bool,
) -> None:
    cluster = start_cluster(smollm2_directory, *KV, *overrides)
    cases = load_reference(REFERENCE)
    if num_at_once == 1 and not is_thorough:
        cases = [case for case in cases if case.case_id in ALONE]

    differences = asyncio.run(compare(cluster.address, cases, num_at_once=num_at_once))

    assert [d for d in differences if not d.is_near_tie] == []
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.parametrize(("name", "overrides"), SETUPS[:2])
def test_bytes_moved_are_blocks_times_block_bytes(
    smollm2_directory: Path, start_cluster: StartCluster, name: str, overrides: tuple[str, ...]
) -> None:
    cluster = start_cluster(smollm2_directory, *KV, *overrides)
    num_tokens = 100
    prompt = tuple(range(1000, 1000 + num_tokens))

    completion = _last(cluster.address, prompt)

    num_blocks = -(-num_tokens // BLOCK_SIZE)
    assert completion.transfer is not None
    assert completion.transfer.num_bytes == num_blocks * BLOCK_SIZE * BYTES_PER_TOKEN
    assert completion.usage.num_prompt_tokens == num_tokens
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.case("B-009")
@pytest.mark.parametrize(("name", "overrides"), SETUPS[:2])
def test_a_prefix_that_decode_has_is_not_moved_again(
    smollm2_directory: Path, start_cluster: StartCluster, name: str, overrides: tuple[str, ...]
) -> None:
    cluster = start_cluster(smollm2_directory, *KV, *overrides)
    prompt = tuple(range(2000, 2050))
    first = _last(cluster.address, prompt)

    second = _last(cluster.address, (*prompt, 7, 8, 9))

    assert first.transfer is not None and second.transfer is not None
    assert first.usage.num_decode_cached_tokens == 0
    assert second.usage.num_decode_cached_tokens == 48
    assert second.usage.num_prefill_cached_tokens == 48
    assert second.transfer.num_bytes == BLOCK_SIZE * BYTES_PER_TOKEN


@pytest.mark.parametrize(("name", "overrides"), SETUPS)
def test_the_phases_add_up_to_the_whole_request(
    smollm2_directory: Path, start_cluster: StartCluster, name: str, overrides: tuple[str, ...]
) -> None:
    cluster = start_cluster(smollm2_directory, *KV, *overrides)

    phases = _last(cluster.address, tuple(range(3000, 3300)), max_tokens=16).phases

    assert phases.prefill_s > 0
    assert phases.decode_s > 0
    assert 0 < phases.time_to_first_token_s < phases.total_s
    assert abs(phases.unaccounted_s) < 0.02 * phases.total_s + 0.005


def _last(address: str, prompt: tuple[int, ...], max_tokens: int = 3) -> Completion:
    with Client(address) as client:
        chunks = list(client.generate(prompt, Sampling(max_tokens=max_tokens, ignore_eos=True)))
    completion = chunks[-1].completion
    assert completion is not None
    assert sum(len(chunk.token_ids) for chunk in chunks) == max_tokens
    return completion
