"""How soon both phases stop when a client goes away: python -m bench.frontdoor.cancel.

Real workers and the real engine. A client leaves in the middle of a long prefill, or of decode;
counted are the steps that its worker still does, and the seconds until router and both workers hold
nothing of it. One step may be running when the client leaves; it is not interrupted.

Steps are read over gRPC shortly before the client leaves, so one more may be counted than was done
after it.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load import random_prompt
from bench.parity import wait_until_ready
from bench.report import Row, print_report
from core.config import load_config
from deploy.local_cluster import local_cluster
from twophase.client import AsyncClient, Sampling

CHUNK_TOKENS = 128
POLL_S = 0.002
STILL_S = 0.5
LIMIT_S = 60.0
SETUP = (
    "router.port=0",
    "router.http_port=null",
    f"prefill.max_batch_tokens={CHUNK_TOKENS}",
    "prefill.kv_cache=256MiB",
    "decode.kv_cache=256MiB",
)


@dataclass(frozen=True, slots=True)
class Stop:
    """One client that left: steps that its worker began after it, and when all was free."""

    num_steps: int
    free_s: float
    num_steps_later: int


@dataclass(slots=True)
class Cancelling:
    """Plays clients that leave."""

    client: AsyncClient
    generator: random.Random
    vocab_size: int

    async def leave(self, worker: str, *, num_prompt_tokens: int, num_steps: int) -> Stop:
        """Leave once `worker` has done `num_steps` steps of a request."""
        prompt = random_prompt(self.generator, num_prompt_tokens, self.vocab_size)
        before = await self._num_steps(worker)
        reading = asyncio.create_task(self._read(prompt))
        while (at_cancel := await self._num_steps(worker)) < before + num_steps:
            await asyncio.sleep(POLL_S)
        started_s = time.monotonic()
        reading.cancel()
        await asyncio.wait([reading])
        while any((await self.client.status()).held.values()):
            await asyncio.sleep(POLL_S)
        free_s = time.monotonic() - started_s
        at_end = await self._num_steps(worker)
        await asyncio.sleep(STILL_S)
        return Stop(at_end - at_cancel, free_s, await self._num_steps(worker) - at_end)

    async def _read(self, prompt: Sequence[int]) -> None:
        sampling = Sampling(max_tokens=500, ignore_eos=True)
        async for _ in self.client.generate(prompt, sampling, timeout_s=LIMIT_S):
            pass

    async def _num_steps(self, name: str) -> int:
        workers = (await self.client.status()).workers
        return next(worker.num_steps for worker in workers if worker.name == name)


def _rows(name: str, step: str, step_s: float, stops: list[Stop]) -> list[Row]:
    return [
        Row(f"{name}: steps after the client left, most", max(s.num_steps for s in stops), step),
        Row(f"{name}: steps later, most", max(s.num_steps_later for s in stops), step),
        Row(
            f"{name}: until all blocks are free, p50",
            statistics.median(s.free_s for s in stops) * 1e3,
            "ms",
            f"one {step.rstrip('s')}",
            step_s * 1e3,
        ),
        Row(f"{name}: until all blocks are free, max", max(s.free_s for s in stops) * 1e3, "ms"),
    ]


async def _measure(address: str, num_rounds: int) -> list[Row]:
    async with AsyncClient(address) as client:
        await wait_until_ready(client)
        model = await client.model()
        cancelling = Cancelling(client, random.Random(5), model.vocab_size)
        prompt = random_prompt(cancelling.generator, 8 * CHUNK_TOKENS, model.vocab_size)
        whole = await client.generate_once(prompt, Sampling(max_tokens=50, ignore_eos=True))
        assert whole.completion is not None
        phases = whole.completion.phases
        prefill = [
            await cancelling.leave("prefill-0", num_prompt_tokens=3000, num_steps=3)
            for _ in range(num_rounds)
        ]
        decode = [
            await cancelling.leave("decode-0", num_prompt_tokens=50, num_steps=10)
            for _ in range(num_rounds)
        ]
    return [
        *_rows("prefill", "chunks", phases.prefill_s / 8, prefill),
        *_rows("decode", "steps", phases.decode_s / 49, decode),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.frontdoor.cancel", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key=value, as in the YAML: model=DIRECTORY")
    parser.add_argument("--rounds", type=int, default=10, help="clients that leave, of each phase")
    arguments = parser.parse_args()
    config = load_config(None, [*SETUP, *arguments.overrides])
    with local_cluster(config, tell=lambda line: None) as cluster:
        rows = asyncio.run(_measure(cluster.address, arguments.rounds))
    print_report("A client goes away", rows)


if __name__ == "__main__":
    main()
