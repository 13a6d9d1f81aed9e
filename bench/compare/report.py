"""The report of a comparison: README.md with its pictures, report.html, and result.json.

All prose is made of the numbers (`verdict`). `write_report` replaces what a report before it wrote.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from bench.compare.crossover import PACE_MULTIPLE, Crossover
from bench.compare.document import (
    Block,
    Bullets,
    Code,
    Heading,
    Paragraph,
    Picture,
    Table,
    html,
    markdown,
)
from bench.compare.figures.gaps import LONG_PERCENT, draw_gaps
from bench.compare.figures.lines import draw_crossover
from bench.compare.figures.shares import draw_shares
from bench.compare.figures.steps import draw_steps
from bench.compare.metrics import Alone
from bench.compare.plan import WorkloadPlan
from bench.compare.run import Comparison
from bench.compare.summary import WorkloadSummary
from bench.compare.verdict import MEASURES, answering, in_short, on_workload, seconds
from bench.compare.ways import WORDS, cores_of

DEFINITIONS = (
    "TTFT is from when a request was due to its first token; TPOT the mean time of each further "
    "token; ITL each gap between two tokens, of all answers together; percentiles by nearest rank.",
    "Splitwise (Patel et al., ISCA'24, table VI): TTFT, time per token and end-to-end time at P50, "
    "P90 and P99 are at most 2/3/6, 1.25/1.5/5 and 1.25/1.5/5 times those of the same request "
    "alone; all nine have to be met. An answer counts as good by it within the limits of P99.",
    "Sarathi-Serve (Agrawal et al., OSDI'24, s.5.1): the p99 of all gaps is at most 5 (strict) or "
    "25 (relaxed) decode steps that no prefill disturbs. There a step has 32 sequences of 4k "
    "tokens; here it has the running streams of the probe.",
    "Goodput is what kept its SLO at the rate that was played, not the highest rate at which "
    "enough would (DistServe, Zhong et al., OSDI'24).",
)


@dataclass(frozen=True, slots=True)
class Origin:
    """How a report came to be: the command, the machine in words, and when."""

    command: str
    machine: str
    at: datetime

    @property
    def words(self) -> str:
        """In one line."""
        return f"{self.at.astimezone(UTC):%Y-%m-%d %H:%M} UTC, {self.machine}"


def write_report(
    comparison: Comparison, summaries: Sequence[WorkloadSummary], origin: Origin, directory: Path
) -> None:
    """Write the files; the directory is made if it is missing."""
    blocks = list(report(comparison, summaries, origin))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "README.md").write_text(markdown(blocks), encoding="utf-8")
    (directory / "report.html").write_text(html(blocks), encoding="utf-8")
    for name in ("crossover", "gaps-*", "steps-*", "shares-*"):
        for stale in directory.glob(f"{name}.svg"):
            stale.unlink()
    for block in blocks:
        if isinstance(block, Picture):
            (directory / f"{block.name}.svg").write_text(block.canvas.file(), encoding="utf-8")
    crossover = comparison.crossover
    result = {
        "command": origin.command,
        "machine": origin.words,
        "workloads": [asdict(summary) for summary in summaries],
        "alone": asdict(comparison.alone) if comparison.alone else None,
        "crossover": asdict(crossover) if crossover is not None else None,
    }
    text = json.dumps(result, indent=1)
    (directory / "result.json").write_text(f"{text}\n", encoding="utf-8")


def report(
    comparison: Comparison, summaries: Sequence[WorkloadSummary], origin: Origin
) -> Iterator[Block]:
    """The whole of it, from verdict to definitions."""
    plan = comparison.plan
    yield Heading(1, "Colocated, chunked or disaggregated")
    ways = "; ".join(f"`{way}`: {WORDS[way]}" for way in plan.ways)
    cores = cores_of(plan)
    where = f"on cores {', '.join(map(str, cores))}" if cores else "wherever there was room"
    yield Paragraph(
        f"The same requests, one way after the other, on {plan.workers} workers of {plan.threads} "
        f"thread(s) {where}: {ways}. Model `{Path(plan.model).name}` in {plan.engine.dtype}, steps "
        f"of at most {plan.chunk_tokens} tokens in `chunked`, {plan.rounds} round(s). "
        f"{origin.words}."
    )
    yield Heading(2, "In short")
    yield Bullets(tuple(in_short(comparison.crossover, plan.crossover, summaries)))
    if comparison.crossover is not None:
        yield from _crossover(comparison, comparison.crossover)
    for summary, workload in zip(summaries, plan.workloads, strict=True):
        yield from _workload(comparison, summary, workload)
    yield Heading(2, "What the words mean")
    yield Bullets(DEFINITIONS)
    yield Heading(2, "How this was made")
    yield Code(origin.command)
    yield Paragraph("The whole plan, defaults included:")
    whole = plan.model_dump(mode="json", exclude_none=True)
    yield Code(yaml.safe_dump(whole, sort_keys=False).strip())


def _crossover(comparison: Comparison, crossover: Crossover) -> Iterator[Block]:
    plan = comparison.plan
    assert plan.crossover is not None
    num_streams = plan.crossover.streams
    yield Heading(2, "From which prompt on it pays to split")
    yield Picture(
        "crossover",
        draw_crossover(crossover),
        f"{num_streams} running streams, and one prompt of each length beside them",
    )
    yield Paragraph(
        "The rule: a way keeps the pace at a length if the p99 of the streams' gaps, while the "
        f"prompt is read, is at most {PACE_MULTIPLE} times a decode step that nothing disturbs "
        f"({seconds(crossover.decode_step_s)}, of the quickest way): Sarathi-Serve's strict "
        "target. Of those that keep it, the one with the soonest first token is the choice; the "
        "crossover is where `disaggregated` becomes, and stays, the choice."
    )
    yield Table(
        ("prompt tokens", *(f"{way}: p99 gap / first token" for way in plan.ways), "choice"),
        tuple(
            (
                str(length),
                *(
                    f"{seconds(points[index].itl_p99_s)} / {seconds(points[index].ttft_s)}"
                    for points in crossover.points.values()
                ),
                choice.value if choice is not None else "none keeps the pace",
            )
            for index, (length, choice) in enumerate(
                zip(crossover.lengths, crossover.choices(crossover.target_s), strict=True)
            )
        ),
    )
    if comparison.alone is not None:
        yield Paragraph(_alone(comparison.alone, comparison.alone_way))


def _alone(alone: Alone, way: str) -> str:
    first = ", ".join(f"{seconds(ttft_s)} at {length}" for length, ttft_s in alone.ttfts_s)
    return (
        f"One request alone in `{way}`, which slowdowns are multiples of: first token after "
        f"{first} prompt tokens, then {seconds(alone.tpot_s)} a token."
    )


def _workload(
    comparison: Comparison, summary: WorkloadSummary, workload: WorkloadPlan
) -> Iterator[Block]:
    name = summary.name
    yield Heading(2, f"Workload {name}")
    yield Paragraph(_described(comparison, workload))
    yield Bullets(tuple(on_workload(summary)))
    yield _table(comparison, summary)
    yield Picture(
        f"gaps-{name}",
        draw_gaps(comparison, name),
        "Each gap between two tokens when it ended, first round; dashed lines: a prompt of the "
        f"longest {100 - LONG_PERCENT} % arrives",
    )
    yield Picture(
        f"steps-{name}",
        draw_steps(comparison, name),
        "Every step of the schedulers around one long prompt, the same span in each way",
    )
    yield Picture(
        f"shares-{name}", draw_shares(summary), "The mean answer's time, from its sending, by phase"
    )


def _described(comparison: Comparison, workload: WorkloadPlan) -> str:
    asks = [answer.ask for answer in comparison.rounds_of(workload.name)[0].answers]
    prompts = sorted(len(ask.prompt) for ask in asks)
    outputs = sorted(ask.num_output_tokens for ask in asks)
    source = "prompts of a file" if workload.prompts else "prompts of one length"
    if workload.trace is not None:
        source = f"lengths of `{workload.trace.name}`, divided by {workload.divide}"
    arrivals = f"at {workload.rate:g} times the trace's rate"
    if workload.requests_per_s is not None or workload.trace is None:
        arrivals = f"at random, {workload.requests_per_s or 1:g} a second (Poisson)"
    return (
        f"{len(asks)} requests a round within {workload.duration_s:g} s: {source}; prompts of "
        f"{prompts[0]} to {prompts[-1]} tokens (median {prompts[len(prompts) // 2]}), answers of "
        f"{outputs[0]} to {outputs[-1]} (median {outputs[len(outputs) // 2]}); they arrive "
        f"{arrivals}."
    )


def _table(comparison: Comparison, summary: WorkloadSummary) -> Table:
    slo = comparison.plan.slo
    rows = []
    for measure in MEASURES[:-1]:
        best = measure.best(answering(summary) or list(summary.ways))
        cells = []
        for way in summary.ways:
            shown = measure.show(measure.read(way))
            cells.append(f"**{shown}**" if way is best else shown)
        rows.append((measure.name, *cells))
    words = f"SLO: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms, own ITL p99 {slo.itl_s:g} s"
    for name, found in (
        (words, [way.slo for way in summary.ways]),
        ("Splitwise's limits of P99", [way.splitwise_good for way in summary.ways]),
    ):
        cells = [f"{one.share:.0%}, {one.per_s:.2f} answers/s" for one in found]
        rows.append((name, *cells))
    rows.append(("Splitwise's nine limits", *(f"{w.num_limits_met} met" for w in summary.ways)))
    rows.append(("requests failed", *(f"{w.num_failed} of {w.num_asked}" for w in summary.ways)))
    return Table(("", *(way.way.value for way in summary.ways)), tuple(rows))
