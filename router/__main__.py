"""Starts the router by hand: python -m router --config cluster.yaml router.workers=[host:port,...].

Prints its address on standard output once it listens.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from core.config import load_config
from core.process import exit_code_of, start_logging, until_signal
from router.config import FrontDoorConfig
from router.server import serve


def main() -> int:
    """Run until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="router", description=__doc__)
    parser.add_argument("--config", type=Path, help="the cluster's YAML; default: all defaults")
    parser.add_argument("overrides", nargs="*", help="key=value, as in the YAML, keys dotted")
    arguments = parser.parse_args()
    start_logging()

    def run() -> None:
        config = FrontDoorConfig.from_cluster(load_config(arguments.config, arguments.overrides))
        asyncio.run(until_signal(lambda stop: serve(config, stop=stop, on_listening=_announce)))

    return exit_code_of(run)


def _announce(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
