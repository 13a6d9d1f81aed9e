"""Starts one prefill worker by hand: python -m prefill_worker --config cluster.yaml.

Prints its address on standard output once it is ready; give that to the router.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from core.config import load_config
from core.process import exit_code_of, start_logging, until_signal
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.server import serve


def main() -> int:
    """Run until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="prefill_worker", description=__doc__)
    parser.add_argument("--config", type=Path, help="the cluster's YAML; default: all defaults")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0: a free one")
    parser.add_argument("--replica", type=int, default=0, help="index in the pool, from 0")
    parser.add_argument("overrides", nargs="*", help="key=value, as in the YAML, keys dotted")
    arguments = parser.parse_args()
    start_logging()

    def run() -> None:
        cluster = load_config(arguments.config, arguments.overrides)
        config = PrefillWorkerConfig.from_cluster(
            cluster, replica=arguments.replica, listen=arguments.listen
        )
        asyncio.run(until_signal(lambda stop: serve(config, stop=stop, on_ready=_announce)))

    return exit_code_of(run)


def _announce(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
