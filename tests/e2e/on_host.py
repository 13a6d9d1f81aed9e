"""What tests have run on another host: python -m tests.e2e.on_host streams|nodes ADDRESS.

Each writes lines of JSON; times are monotonic, which all processes of a machine share.
"""

import asyncio
import json
import sys
import time

import ray

from twophase.client import AsyncClient, Sampling

NUM_STREAMS = 8
NUM_TOKENS = 600
LATE_S = 240.0


def tell(**facts: object) -> None:
    """One line."""
    sys.stdout.write(json.dumps({"now_s": time.monotonic(), **facts}) + "\n")
    sys.stdout.flush()


async def streams(address: str) -> None:
    """Eight answers side by side: when all have begun, and what each ended with."""
    answers: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
    failures: list[str] = []

    async def run(number: int, client: AsyncClient) -> None:
        prompt = [(7 * number + 3 * place) % 250 for place in range(60 + 20 * number)]
        sampling = Sampling(
            max_tokens=NUM_TOKENS,
            temperature=0.9 if number % 2 else 0.0,
            top_k=8,
            seed=number + 20,
            ignore_eos=True,
        )
        async for chunk in client.generate(prompt, sampling):
            answers[number] += chunk.token_ids
            if chunk.completion is not None:
                failures.extend(str(failure) for failure in chunk.completion.failures)

    async with AsyncClient(address) as client, asyncio.timeout(LATE_S):
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(run(number, client))
            while not all(answers):
                await asyncio.sleep(0.005)
            tell(begun=True)
        workers = (await client.status()).workers
        links = [link.backend for worker in workers for link in worker.links]
        tell(answers=answers, failures=failures, workers=[w.name for w in workers], links=links)


def nodes(address: str) -> None:
    """How many nodes Ray takes for living, at each change."""
    ray.init(address=address, namespace="twophase", log_to_driver=False)
    num_last, until_s = -1, time.monotonic() + LATE_S
    while time.monotonic() < until_s:
        num_alive = sum(node["Alive"] for node in ray.nodes())
        if num_alive != num_last:
            tell(num_alive=num_alive)
            num_last = num_alive
        time.sleep(0.05)


if __name__ == "__main__":
    what, where = sys.argv[1:]
    if what == "streams":
        asyncio.run(streams(where))
    else:
        nodes(where)
