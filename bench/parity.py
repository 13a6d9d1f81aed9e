"""Compares what a cluster answers with a file of reference tokens, in every mode and transport.

    python -m bench.parity greedy_float32.jsonl [MODEL]

Each line of the file is one greedy answer of an independent implementation on the same weights in
float32: `id`, `prompt_token_ids`, `max_tokens`, `output_token_ids`, and per step `margins`, the
largest logit minus the second largest. Two right implementations may choose differently where
that margin is tiny, so a difference at a margin below NEAR_TIE is listed and allowed; any other
is a failure and the exit code is 1.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.report import Row, print_report
from core.config import ClusterConfig, load_config
from core.model_path import DEFAULT_MODEL
from deploy.local_cluster import local_cluster
from twophase.client import AsyncClient, Sampling

NEAR_TIE = 1e-3
NUM_AT_ONCE = 8
READY_TIMEOUT_S = 60.0

SETUPS = (
    ("disaggregated over shm", ("mode=disaggregated", "transfer.backend=shm")),
    ("disaggregated over torch", ("mode=disaggregated", "transfer.backend=torch")),
    ("chunked", ("mode=chunked", "decode.max_batch_tokens=256")),
    ("colocated", ("mode=colocated",)),
)


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    """One reference answer."""

    case_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    output_token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not the reference's."""

    case_id: str
    index: int
    got: int | None
    expected: int | None
    margin: float

    @property
    def is_near_tie(self) -> bool:
        """Whether two right implementations may differ here."""
        return self.margin < NEAR_TIE

    def __str__(self) -> str:
        return (
            f"{self.case_id}: token {self.index} is {self.got}, reference {self.expected} "
            f"(margin {self.margin:g})"
        )


def load_reference(path: Path) -> list[ReferenceCase]:
    """All cases of a reference file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        ReferenceCase(
            row["id"],
            tuple(row["prompt_token_ids"]),
            row["max_tokens"],
            tuple(row["output_token_ids"]),
            tuple(row["margins"]),
        )
        for row in rows
    ]


def first_difference(case: ReferenceCase, token_ids: Sequence[int]) -> Difference | None:
    """Where `token_ids` leaves the reference; None when it is equal to its end."""
    expected = case.output_token_ids
    for index in range(max(len(token_ids), len(expected))):
        got = token_ids[index] if index < len(token_ids) else None
        want = expected[index] if index < len(expected) else None
        if got != want:
            margin = case.margins[index] if index < len(case.margins) else float("inf")
            return Difference(case.case_id, index, got, want, margin)
    return None


async def compare(
    address: str, cases: Sequence[ReferenceCase], *, num_at_once: int
) -> list[Difference]:
    """Differences of all answers, with `num_at_once` requests in flight."""
    slots = asyncio.Semaphore(num_at_once)

    async def one(client: AsyncClient, case: ReferenceCase) -> Difference | None:
        token_ids: list[int] = []
        sampling = Sampling(max_tokens=case.max_tokens, temperature=0.0)
        async with slots:
            async for chunk in client.generate(case.prompt_token_ids, sampling):
                token_ids += chunk.token_ids
        return first_difference(case, token_ids)

    async with AsyncClient(address) as client:
        await wait_until_ready(client)
        differences = await asyncio.gather(*(one(client, case) for case in cases))
    return [difference for difference in differences if difference is not None]


async def wait_until_ready(client: AsyncClient) -> None:
    """Return once a token went through the cluster; TimeoutError after READY_TIMEOUT_S."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not (await client.status()).is_ready:
            await asyncio.sleep(0.1)


def main() -> int:
    """Run all setups; 1 if any answer differs where it may not."""
    parser = argparse.ArgumentParser(prog="bench.parity", description=__doc__)
    parser.add_argument("reference", type=Path)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this directory")
    arguments = parser.parse_args()
    cases = load_reference(arguments.reference)
    rows, failures = [], []
    for name, overrides in SETUPS:
        ports = ("router.port=0", "router.http_port=null")
        config = load_config(None, [f"model={arguments.model}", *ports, *overrides])
        for num_at_once, differences, seconds in _run_setup(
            config, cases, arguments.logs and arguments.logs / name.replace(" ", "-")
        ):
            title = f"{name}, {num_at_once} at once"
            failures += [d for d in differences if not d.is_near_tie]
            for difference in differences:
                Console().print(f"{title}: {difference}", highlight=False)
            rows.append(Row(f"{title}: equal", len(cases) - len(differences), "answers"))
            rows.append(Row(f"{title}: time", seconds, "s"))
    print_report(f"Parity with {arguments.reference.name}, {len(cases)} answers", rows)
    return 1 if failures else 0


def _run_setup(
    config: ClusterConfig, cases: Sequence[ReferenceCase], logs: Path | None
) -> list[tuple[int, list[Difference], float]]:
    results = []
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    with local_cluster(config, tell=lambda line: None, log_directory=logs) as cluster:
        for num_at_once in (1, NUM_AT_ONCE):
            started_s = time.monotonic()
            differences = asyncio.run(compare(cluster.address, cases, num_at_once=num_at_once))
            results.append((num_at_once, differences, time.monotonic() - started_s))
    return results


if __name__ == "__main__":
    sys.exit(main())
