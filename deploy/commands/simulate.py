"""`twophase simulate` and `twophase what-if`: what configurations would do with a load.

On a manual clock; the load is a trace, or what a router recorded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.config import ClusterConfig, load_config

# The rest of the command line starts without numpy and the simulator: imported where it is used.
if TYPE_CHECKING:
    from bench.simulate.cluster import Run
    from bench.simulate.fault import Faults
    from bench.simulate.trace import Arrival
    from deploy.autoscaler.record import Record

Good = Annotated[
    tuple[float, float],
    typer.Option(
        help="Good answers: seconds to the first token, besides twice the reading, and mean gap."
    ),
]
Rate = Annotated[float, typer.Option(min=1e-6, help="Times the trace's rate.")]


def simulate(  # noqa: PLR0913 - one for each option
    config: Annotated[Path, typer.Option(help="The cluster's YAML.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="Azure CSV, Mooncake JSON lines or a record; default: synthetic."),
    ] = None,
    rate: Rate = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="So many: the trace is cut, or repeated.")
    ] = None,
    slo: Good = (2.0, 0.15),
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="What goes wrong, may be repeated: lost:decode@120, lost:0.5/h (each worker), "
            "link:0.1@300-600 (a tenth of its rate), start:prefill@0-900."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    figure: Annotated[
        Path | None, typer.Option(help="Write a PNG of the run; needs matplotlib.")
    ] = None,
) -> None:
    """Play a trace through the cluster's own decisions, and tell each of them in words."""
    from bench.simulate.cluster import BLOCK_TOKENS
    from bench.simulate.fault import Faults
    from bench.simulate.outcome import Outcome, Slo
    from bench.simulate.report import draw, print_run, require_matplotlib
    from bench.simulate.trace import poisson, read_trace, scaled

    if figure is not None:
        require_matplotlib()
    arrivals = poisson(1.0, 3600.0, 512, 128)
    if trace is not None:
        arrivals = read_trace(trace, block_size=BLOCK_TOKENS)
    arrivals = scaled(arrivals, rate=rate, num_requests=requests)
    run, records = _played(load_config(config), arrivals, Faults.parse(fault or (), seed=seed))
    targets = Slo(*slo)
    print_run(run, Outcome.of(run, targets), targets, records)
    if figure is not None:
        draw(run, figure)


def what_if(
    recorded: Annotated[Path, typer.Option(help="The file that router.record names, or a trace.")],
    config: Annotated[Path, typer.Option(help="A cluster's YAML.")],
    against: Annotated[Path, typer.Option(help="That of another cluster.")],
    rate: Rate = 1.0,
    slo: Good = (2.0, 0.15),
) -> None:
    """Play what a router recorded under two configurations, side by side."""
    from bench.simulate.cluster import BLOCK_TOKENS
    from bench.simulate.fault import Faults
    from bench.simulate.outcome import Outcome, Slo
    from bench.simulate.report import print_side_by_side
    from bench.simulate.trace import read_trace, scaled

    clusters = {str(path): load_config(path) for path in (config, against)}
    arrivals = scaled(read_trace(recorded, block_size=BLOCK_TOKENS), rate=rate)
    targets = Slo(*slo)
    outcomes = {
        name: Outcome.of(_played(cluster, arrivals, Faults())[0], targets)
        for name, cluster in clusters.items()
    }
    print_side_by_side(outcomes, targets)


def _played(
    cluster: ClusterConfig, arrivals: "Sequence[Arrival]", faults: "Faults"
) -> "tuple[Run, Sequence[Record]]":
    from bench.simulate.cluster import Autoscaled, Simulation
    from bench.simulate.machine import LINK_BYTES_PER_S, fitted

    link = LINK_BYTES_PER_S.get(cluster.transfer.backend, LINK_BYTES_PER_S["shm"])
    machine = fitted(link_bytes_per_s=link)
    decide = Autoscaled(cluster) if cluster.scaling is not None else None
    run = Simulation(cluster, machine, decide=decide, faults=faults).run(arrivals)
    return run, decide.records if decide is not None else ()
