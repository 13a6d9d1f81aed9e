"""Everything there is to know about a card, in one run: right, fast, and beside what it can do.

    bench/gpu_check.sh [--model DIRECTORY] [--dry-run]

Sections, in this order, each on its own: what fails is a note at the end and exit code 1, and the
others run; those for which no time is left are named. Needs no Ray, no network and no checkpoint.
--model compares a checkpoint with a file of reference tokens, too. --dry-run runs all of it at toy
size on a CPU, with the doubles of a card and of flash-attn: it shows that the script works, and no
number of it means anything.
"""

import argparse
import logging
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu import pair, parity, speed
from bench.gpu.setup import Findings, Setup
from bench.report import print_report
from core.errors import TwophaseError
from engine.runner import Runner

REFERENCE = Path(__file__).parents[2] / "tests" / "data" / "smollm2_greedy_float32.jsonl"
# A section may take a minute more; bench/gpu_check.sh ends it all before 8.
BUDGET_S = 390.0
NUM_REFERENCE_ROWS = 16

LOG = logging.getLogger("gpu_check")


class Check:
    """The sections of one run."""

    def __init__(self, setup: Setup, findings: Findings, *, budget_s: float) -> None:
        self._setup = setup
        self._findings = findings
        self._started_s = time.monotonic()
        self._budget_s = budget_s
        self._runner: Runner | None = None
        self._limits: speed.Limits | None = None
        self.num_failed = 0

    def run(self, model: Path | None, reference: Path) -> None:
        """All sections; never raises what a section raised."""
        setup, findings = self._setup, self._findings
        device = setup.open()
        card = device.torch_device
        self._section("attention", lambda: parity.compare_attention(setup, findings, device))
        self._section("random model", lambda: parity.compare_random_model(setup, findings, device))
        if model is not None:
            self._section(
                "checkpoint",
                lambda: parity.compare_checkpoint(
                    findings, device, model, reference, NUM_REFERENCE_ROWS
                ),
            )
        self._section("limits", lambda: self._measure_limits(card))
        self._section("handoff", lambda: pair.measure_handoff(setup, findings, card))
        self._section("load", self._load)
        runner, limits = self._runner, self._limits
        if runner is None or limits is None:
            return
        self._section("decode", lambda: speed.measure_decode(setup, findings, runner, limits))
        self._section("prefill", lambda: speed.measure_prefill(setup, findings, runner, limits))
        self._section("interference", lambda: pair.measure_interference(setup, findings, runner))

    def _section(self, name: str, run: Callable[[], None]) -> None:
        used_s = time.monotonic() - self._started_s
        if used_s > self._budget_s:
            self._findings.notes.append(f"{name}: no time left after {used_s:.0f} s")
            return
        LOG.info("%s, after %.0f s", name, used_s)
        try:
            run()
        except (TwophaseError, RuntimeError, AssertionError, pair.NoAnswer) as error:
            LOG.exception("%s failed", name)
            self._findings.notes.append(f"{name} failed: {(str(error) or repr(error))[:300]}")
            self.num_failed += 1

    def _measure_limits(self, card: torch.device) -> None:
        self._limits = speed.measure_limits(self._setup, self._findings, card)

    def _load(self) -> None:
        """The large model, its graphs captured; what it chose becomes a note."""
        setup = self._setup
        started_s = time.monotonic()
        runner = setup.runner(
            setup.open(),
            max_decode_sequences=max(setup.decode_batches),
            kv_cache_bytes=setup.kv_cache_bytes,
        )
        self._findings.add("load, warm up and capture", time.monotonic() - started_s, "s")
        self._findings.notes.append(f"the model's kernels: {runner.kernels}")
        self._runner = runner


def main() -> int:
    """Run and print; 1 if a section failed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint's directory, for parity")
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="its reference tokens")
    parser.add_argument("--dry-run", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no section after this")
    parser.add_argument("--kv-cache-gib", type=float, default=24.0, help="of the large model")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    setup = Setup.of(is_dry=arguments.dry_run, kv_cache_gib=arguments.kv_cache_gib)
    findings = Findings()
    check = Check(setup, findings, budget_s=arguments.budget_s)
    try:
        check.run(arguments.model, arguments.reference)
    except KeyboardInterrupt:
        findings.notes.append("interrupted: what is missing was not measured")
        check.num_failed += 1
    for note in findings.notes:
        sys.stdout.write(f"note: {note}\n")
    machine = _machine(setup)
    facts = {"machine": machine, "notes": findings.notes, "is_dry": setup.is_dry}
    print_report(f"{machine}, {setup.model_name}", findings.rows, facts)
    return 1 if check.num_failed else 0


def _machine(setup: Setup) -> str:
    card = "double on a CPU" if setup.is_dry else torch.cuda.get_device_name(0)
    return f"{card}, torch {torch.__version__}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
