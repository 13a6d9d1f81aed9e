"""How fast each transfer backend moves KV blocks, and what of it a request feels.

`python -m bench.transfer` prints, in one run:

- GB/s of whole handoffs by each backend, beside memcpy of the same bytes and, for torch, beside a
  bare gloo loop (`transfer_pair` says what is measured); medians over rounds that all contenders
  take in turns. nixl has rows where the extra `rdma` is installed.
- What the checksums cost: the time to hash a prompt's KV cache at both ends, as a share of the time
  that its prefill took.
- The share of the time to first token that the handoff adds in a real cluster (`transfer_exposed`).

A row whose peer is "limit" has met its aim when the ratio is 1 or less.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from bench import transfer_exposed
from bench.machine import CpuMeter
from bench.report import Row, print_report
from bench.transfer_exposed import Exposure
from bench.transfer_pair import HOST, CacheSize, Case, Links, Pair
from core.layout import Dtype, KVLayout
from core.model_path import DEFAULT_MODEL
from kv_transfer.backend import ReceiverBackend
from kv_transfer.nixl import agent as nixl_agent
from kv_transfer.nixl.backend import NixlBackend
from kv_transfer.shm import ShmBackend
from kv_transfer.torch_backend import TorchBackend

SMOLLM2 = KVLayout("bench", Dtype.FLOAT32, 16, 30, 3, 64)
# One block over its 8 layers is 64 KiB.
POWERS_OF_TWO = KVLayout("bench", Dtype.FLOAT32, 16, 8, 1, 64)
SIZES = {"64 KiB": 1, "512 KiB": 8, "4 MiB": 64, "64 MiB": 1024}
PROMPTS_TOKENS = (128, 512, 2048, 8000)
CHECKSUM_LIMIT = 0.02
EXPOSED_LIMIT = {"shm": 0.01, "torch": 0.02}


def cases() -> list[Case]:
    """Sizes in powers of two, then prompts of SmolLM2-135M in float32."""
    sizes = [Case(name, POWERS_OF_TWO, num_blocks) for name, num_blocks in SIZES.items()]
    prompts = [Case(_tokens(num), SMOLLM2, SMOLLM2.num_blocks(num)) for num in PROMPTS_TOKENS]
    return [*sizes, *prompts, Case("512 tokens, scattered", SMOLLM2, 32, is_scattered=True)]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Median seconds of every contender in every case, and cores that others used meanwhile."""

    seconds: dict[Case, dict[str, float]]
    other_cores: float


def measure_speeds() -> Speeds:
    """All cases, in one pair of processes."""
    seconds: dict[Case, dict[str, float]] = {}
    meter = CpuMeter()
    with Pair() as pair:
        for layout in (POWERS_OF_TWO, SMOLLM2):
            of_layout = [case for case in cases() if case.layout is layout]
            size = CacheSize(layout, max(case.num_blocks for case in of_layout))
            with Links(pair, size, _backends()) as links:
                seconds |= {case: links.measure(case) for case in of_layout}
        return Speeds(seconds, meter.read().other_cores)


def _backends() -> list[ReceiverBackend]:
    backends: list[ReceiverBackend] = [ShmBackend(), TorchBackend(host=HOST)]
    return [*backends, NixlBackend(host=HOST)] if nixl_agent.is_installed() else backends


def speed_rows(case: Case, seconds: dict[str, float]) -> list[Row]:
    """GB/s of each backend beside its peers."""
    speed = {name: case.num_bytes / value / 1e9 for name, value in seconds.items()}
    pairs = [("shm", "memcpy"), ("torch", "gloo"), ("torch", "memcpy"), ("nixl", "memcpy")]
    return [
        Row(f"{case.name}, {kind}", speed[kind], "GB/s", peer, speed[peer])
        for kind, peer in pairs
        if kind in speed
    ]


def checksum_rows(seconds: dict[str, float], exposures: Sequence[Exposure]) -> list[Row]:
    """Both ends' hashing as a share of prefill; `seconds` to hash once, by the case's name."""
    return [
        Row(
            f"{_tokens(e.num_tokens)}, checksums",
            100 * 2 * seconds[_tokens(e.num_tokens)] / e.prefill_s,
            "% of prefill",
            "limit",
            100 * CHECKSUM_LIMIT,
        )
        for e in exposures
    ]


def exposed_rows(exposures: Sequence[Exposure]) -> list[Row]:
    """Exposed transfer, its share of the time to first token, and that time itself."""
    rows = []
    for e in exposures:
        name = f"{_tokens(e.num_tokens)}, {e.backend}"
        limit = 100 * EXPOSED_LIMIT[e.backend]
        rows += [
            Row(f"{name}: exposed", 1e3 * e.exposed_s, "ms"),
            Row(f"{name}: exposed", 100 * e.share, "% of TTFT", "limit", limit),
            Row(f"{name}: first token", 1e3 * e.ttft_s, "ms"),
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything and print the report."""
    parser = argparse.ArgumentParser(prog="bench.transfer", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="for the exposed transfer")
    model = parser.parse_args(arguments).model
    speeds = measure_speeds()
    exposures = [e for kind in EXPOSED_LIMIT for e in transfer_exposed.measure(kind, model)]
    rows = [row for case, seconds in speeds.seconds.items() for row in speed_rows(case, seconds)]
    hashing = {case.name: seconds["checksum"] for case, seconds in speeds.seconds.items()}
    rows += checksum_rows(hashing, [e for e in exposures if e.backend == "shm"])
    rows += exposed_rows(exposures)
    rows.append(Row("other processes, while speeds were measured", speeds.other_cores, "cores"))
    if not nixl_agent.is_installed():
        Console().print(f"no rows for nixl: {nixl_agent.INSTALL_HINT}", highlight=False)
    print_report("KV transfer: one prefill and one decode process", rows)


def _tokens(num_tokens: int) -> str:
    return f"{num_tokens} tokens"


if __name__ == "__main__":
    main()
