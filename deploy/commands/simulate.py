"""`twophase simulate`: what a configuration would do with a trace, on a manual clock."""

from pathlib import Path
from typing import Annotated

import typer

from core.config import load_config


def simulate(  # noqa: PLR0913 - one for each option
    config: Annotated[Path, typer.Option(help="The cluster's YAML.")],
    trace: Annotated[
        Path | None, typer.Option(help="Azure CSV or Mooncake JSON lines; default: synthetic.")
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Times the trace's rate.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="So many: the trace is cut, or repeated.")
    ] = None,
    slo: Annotated[
        tuple[float, float],
        typer.Option(help="Good: seconds to the first token, and mean gap."),
    ] = (2.0, 0.15),
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="What goes wrong, may be repeated: lost:decode@120, lost:0.5/h (each worker), "
            "link:0.1@300-600 (a tenth of its rate), start:prefill@0-900."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="Write a PNG of the run.")] = None,
) -> None:
    """Play a trace through the cluster's own decisions, and tell each of them in words."""
    # The rest of the command line starts without numpy and the simulator.
    from bench.simulate.cluster import BLOCK_TOKENS, Autoscaled, Simulation
    from bench.simulate.fault import Faults
    from bench.simulate.machine import LINK_BYTES_PER_S, fitted
    from bench.simulate.outcome import Outcome, Slo
    from bench.simulate.report import draw, print_run
    from bench.simulate.trace import poisson, read_trace, scaled

    cluster = load_config(config)
    arrivals = poisson(1.0, 3600.0, 512, 128)
    if trace is not None:
        arrivals = read_trace(trace, block_size=BLOCK_TOKENS)
    link = LINK_BYTES_PER_S.get(cluster.transfer.backend, LINK_BYTES_PER_S["shm"])
    decide = Autoscaled(cluster) if cluster.scaling is not None else None
    faults = Faults.parse(fault or (), seed=seed)
    machine = fitted(link_bytes_per_s=link)
    simulation = Simulation(cluster, machine, decide=decide, faults=faults)
    run = simulation.run(scaled(arrivals, rate=rate, num_requests=requests))
    targets = Slo(*slo)
    print_run(run, Outcome.of(run, targets), targets, decide.records if decide is not None else ())
    if figure is not None:
        draw(run, figure)
