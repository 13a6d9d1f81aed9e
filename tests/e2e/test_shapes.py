"""Workers of different shapes: block sizes, numbers of ranks and formats that differ by pool."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench.parity import wait_until_ready
from core.completion import Completion
from core.config import load_config
from core.errors import PeerLost
from core.layout import Dtype
from core.process import EXIT_REFUSED
from deploy.local_cluster import LocalCluster, local_cluster
from engine.runner import Runner
from tests.e2e.nothing_left import assert_nothing_left
from tests.engine_loop import generate
from twophase.client import AsyncClient, Sampling

MAX_TOKENS = 10
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
TOKEN_VALUES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM
SMALL = ("decode.kv_cache=4MiB", "prefill.kv_cache=4MiB", "engine.max_context_tokens=1024")
LATE_S = 30.0

RunCluster = Callable[..., AbstractContextManager[LocalCluster]]

SHAPES = {
    "blocks 16 to 32": ("prefill.block_size=16", "decode.block_size=32"),
    "blocks 32 to 16": ("prefill.block_size=32", "decode.block_size=16"),
    "blocks 24 to 16": ("prefill.block_size=24", "decode.block_size=16"),
    "ranks 1 to 2": ("decode.tensor_parallel=2",),
    "ranks 2 to 1": ("prefill.tensor_parallel=2",),
    "ranks 2 to 2": ("prefill.tensor_parallel=2", "decode.tensor_parallel=2"),
    "ranks 1 to 4 and blocks 8 to 16": (
        "decode.tensor_parallel=4",
        "prefill.block_size=8",
        "decode.block_size=16",
    ),
}

DIFFERENT = ("prefill.block_size=8", "decode.tensor_parallel=2")


@pytest.fixture
def run_cluster(tiny_model_directory: Path, tmp_path: Path) -> RunCluster:
    """A cluster of the tiny model for one test: together they would be too many processes."""

    @contextlib.contextmanager
    def run(*overrides: str) -> Iterator[LocalCluster]:
        model = f"model={tiny_model_directory}"
        ports = ("router.port=0", "router.http_port=null")
        config = load_config(None, [model, *ports, *SMALL, *overrides])
        with local_cluster(config, tell=lambda line: None, log_directory=tmp_path) as cluster:
            asyncio.run(_ready(cluster.address))
            yield cluster

    return run


async def _ready(address: str) -> None:
    async with AsyncClient(address) as client:
        await wait_until_ready(client)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of all lengths around block borders; the last ones share their prefix with an earlier one."""
    draw = random.Random(11)
    lengths = (1, 15, 16, 17, 31, 33, 47, 48, 49, 100, 257)
    prompts = [[draw.randrange(3, 512) for _ in range(length)] for length in lengths]
    return [*prompts, [*prompts[-1], 5, 6, 7], [*prompts[-2][:70], 8]]


@pytest.fixture(scope="module")
def expected(tiny_model_directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    runner = Runner(
        tiny_model_directory,
        dtype=Dtype.FLOAT32,
        block_size=16,
        kv_cache_bytes=4 << 20,
        num_threads=1,
    )
    return generate(runner, prompts, max_tokens=MAX_TOKENS)


async def _ask_all(address: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens and shipped bytes of each prompt: all at once, the last two when the rest is done."""

    async def ask(client: AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
        token_ids: list[int] = []
        sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
        async for chunk in client.generate(tuple(prompt), sampling):
            token_ids += chunk.token_ids
            completion = chunk.completion
        assert completion is not None and completion.transfer is not None
        return token_ids, completion.transfer.num_bytes

    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts[:-2]))
        answers += [await ask(client, prompt) for prompt in prompts[-2:]]
    return [tokens for tokens, _ in answers], [num_bytes for _, num_bytes in answers]


@pytest.mark.case("B-025", "B-032")
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ("blocks 16 to 32", "shm"),
        ("blocks 24 to 16", "torch"),
        ("ranks 1 to 2", "torch"),
        ("ranks 2 to 1", "shm"),
        ("ranks 1 to 4 and blocks 8 to 16", "shm"),
        pytest.param("blocks 32 to 16", "shm", marks=pytest.mark.thorough),
        pytest.param("blocks 24 to 16", "shm", marks=pytest.mark.thorough),
        pytest.param("ranks 1 to 2", "shm", marks=pytest.mark.thorough),
        pytest.param("ranks 2 to 1", "torch", marks=pytest.mark.thorough),
        pytest.param("ranks 2 to 2", "shm", marks=pytest.mark.thorough),
    ],
)
def test_a_handoff_between_shapes_gives_the_tokens_of_one_process(
    run_cluster: RunCluster,
    prompts: list[list[int]],
    expected: list[list[int]],
    shape: str,
    backend: str,
) -> None:
    overrides = (*SHAPES[shape], f"transfer.backend={backend}", "prefill.max_batch_tokens=40")
    with run_cluster(*overrides) as cluster:
        answers, num_bytes = asyncio.run(_ask_all(cluster.address, prompts))
        asyncio.run(assert_nothing_left(cluster.address))

    assert answers == expected
    block_size = 32 if "to 32" in shape else 16
    num_copies = 2 if "1 to 4" in shape else 1  # four ranks hold two heads twice
    block_bytes = block_size * TOKEN_VALUES * Dtype.FLOAT32.itemsize * num_copies
    assert num_bytes[5] == -(-len(prompts[5]) // block_size) * block_bytes
    # the prefix that decode has is not shipped again, whatever the shapes
    assert num_bytes[-2] == block_bytes


@pytest.mark.case("B-027")
@pytest.mark.parametrize(
    ("prefill", "decode", "more", "backend"),
    [
        ("bfloat16", "float32", (), "shm"),
        ("float32", "bfloat16", DIFFERENT, "torch"),
        pytest.param("bfloat16", "float32", (), "torch", marks=pytest.mark.thorough),
        pytest.param("float32", "bfloat16", DIFFERENT, "shm", marks=pytest.mark.thorough),
    ],
)
def test_a_handoff_between_formats_ships_bytes_of_the_target(
    run_cluster: RunCluster,
    prompts: list[list[int]],
    expected: list[list[int]],
    prefill: str,
    decode: str,
    more: tuple[str, ...],
    backend: str,
) -> None:
    formats = (f"prefill.dtype={prefill}", f"decode.dtype={decode}", "transfer.convert_dtype=true")
    with run_cluster(*formats, *more, f"transfer.backend={backend}") as cluster:
        answers, num_bytes = asyncio.run(_ask_all(cluster.address, prompts))
        asyncio.run(assert_nothing_left(cluster.address))

    # rounded to bfloat16 on one side, most answers still begin as in float32
    assert sum(a[:2] == e[:2] for a, e in zip(answers, expected, strict=True)) >= len(prompts) - 3
    num_blocks = -(-len(prompts[5]) // 16)
    assert num_bytes[5] == num_blocks * 16 * TOKEN_VALUES * Dtype(decode).itemsize


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_rank_dies_ends_and_says_why(run_cluster: RunCluster, role: str) -> None:
    async def ask(address: str) -> Completion | None:
        async with AsyncClient(address) as client:
            chunks = client.generate((1, 2, 3), Sampling(max_tokens=4, ignore_eos=True))
            return [chunk async for chunk in chunks][-1].completion

    with run_cluster(f"{role}.tensor_parallel=2", "router.max_wait_s=0.1") as cluster:
        worker = cluster.children[f"{role}-0"]
        listing = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(worker.process.pid)], capture_output=True, text=True
        )
        os.kill(int(listing.stdout), signal.SIGKILL)
        asking = asyncio.wait_for(ask(cluster.address), LATE_S)
        if role == "decode":
            with pytest.raises(PeerLost, match="no decode worker"):
                asyncio.run(asking)
        else:
            completion = asyncio.run(asking)
            assert completion is not None
            assert completion.usage.num_local_prefill_tokens == 3
        assert worker.process.wait(LATE_S) == EXIT_REFUSED
        assert "a rank of this worker was lost: its connection ended" in worker.log.read_text()
