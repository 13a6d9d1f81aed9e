"""The command line: `twophase serve`, `demo`, `ask`, `status` and the rest; `--help` lists them.

Exit codes: 0 done, 1 done and something is wrong, 2 refused (one line on standard error says why),
130 interrupted.
"""

import os
import queue
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.status import Status
from rich.table import Table

from core.completion import ChatMessage, Completion
from core.config import ClusterConfig
from core.errors import TwophaseError
from core.process import EXIT_REFUSED
from core.settings.router import RouterConfig
from deploy.commands.cluster_file import Config, Overrides, load
from deploy.commands.compare import compare
from deploy.commands.config import config_app
from deploy.commands.connection import DEFAULT_ADDRESS, Address, connect, connection_options
from deploy.commands.doctor import doctor
from deploy.commands.explain import diagnose, explain
from deploy.commands.key import key_app
from deploy.commands.phase_bar import phase_bar, phase_legend, summary
from deploy.commands.scaling import scaling_app
from deploy.commands.simulate import simulate, what_if
from deploy.commands.status import status
from deploy.commands.timeline import timeline
from deploy.commands.up import down, up
from deploy.live_config import LiveConfig
from deploy.own_client import own_client, wait_until_ready
from twophase.client import Client, Prompt, Sampling

READY_TIMEOUT_S = 120.0
LOOK_S = 2.0
DEMO_PROMPT = "What is the capital of Portugal? Answer in one short sentence."
EXIT_INTERRUPTED = 130

HELP = """Serve a language model with prefill and decode in pools of their own.

Begin with `twophase serve`, then `twophase ask "Why is the sky blue?"` in another terminal.

Where the router asks for an API key, put yours into the environment variable TWOPHASE_API_KEY.

Exit codes: 0 done, 1 done and something is wrong, 2 refused (one line on standard error says why),
130 interrupted.
"""
app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP
)
app.callback()(connection_options)
model_app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")

out = Console()
err = Console(stderr=True)

WithoutRay = Annotated[bool, typer.Option(help="Child processes instead of Ray actors.")]
DryRun = Annotated[bool, typer.Option(help="Decide how pools should scale, and only say so.")]


def serve(
    config: Config = None,
    overrides: Overrides = None,
    without_ray: WithoutRay = False,
    dry_run: DryRun = False,
) -> None:
    """Start a cluster and serve until Ctrl-C, which drains it; a second Ctrl-C stops at once.

    SIGHUP has it read its file again.
    """

    def read() -> ClusterConfig:
        return load(config, overrides, dry_run=dry_run)

    cluster = read()
    live = LiveConfig(cluster)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _running(cluster, without_ray=without_ray, live=live) as address:
        http = _http(address, cluster)
        _on_signals(signals)  # before anybody is told that they may send some
        _say_ready(address, http, cluster)
        while (number := _next(signals)) in (None, signal.SIGHUP):
            if number is None:
                _require_router(address)
                continue
            reload = live.reload(read, lambda router: _reconfigure(address, cluster, router))
            out.print(escape(reload.sentence), soft_wrap=True, highlight=False)


def demo(
    config: Config = None,
    overrides: Overrides = None,
    without_ray: WithoutRay = False,
) -> None:
    """Start a cluster, ask one question, show the answer and its phases, and stop."""
    ports = ("router.port=0", "router.http_port=null")
    cluster = load(config, [*ports, *(overrides or [])])
    with (
        _running(cluster, without_ray=without_ray) as address,
        own_client(address, cluster.security) as client,
    ):
        out.print(f"[green]ready[/] at {address}, mode {cluster.mode}; asking:")
        out.print(f"  {DEMO_PROMPT}", style="italic")
        _stream(client, [ChatMessage("user", DEMO_PROMPT)], Sampling(max_tokens=64))


def ask(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    address: Address = DEFAULT_ADDRESS,
    raw: Annotated[bool, typer.Option(help="Continue the text instead of chatting.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer [256].")] = None,
    temperature: Annotated[float | None, typer.Option(help="0, or none, is greedy.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the draws, for a temperature over 0.")
    ] = None,
) -> None:
    """Stream an answer, then show where its time went."""
    text = sys.stdin.read() if prompt == "-" else prompt
    message: Prompt = text if raw else [ChatMessage("user", text)]
    with connect(address) as client:
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
        completion = _stream(client, message, sampling)
    if completion is not None:
        _hint(f"{own_name()} explain{_at(address)} {completion.request_id}")


def chaos(config: Config = None, overrides: Overrides = None) -> None:
    """Start a cluster, kill and pause its workers under load; show what became of every stream."""
    from deploy.commands.chaos import chaos_run

    cluster = load(config, ["router.port=0", "router.http_port=null", *(overrides or [])])
    directory = _served_name(cluster.model, _fetch(cluster.model))
    raise typer.Exit(chaos_run(cluster.model_copy(update={"model": directory}), out))


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="Known name, Hugging Face id or directory.")],
) -> None:
    """Fetch a model and print its directory."""
    out.print(str(_fetch(name)), soft_wrap=True, highlight=False)


@model_app.command("list")
def model_list() -> None:
    """Show the models that are known by name or were fetched."""
    from deploy.model_store import list_models

    table = Table("model", "what", "directory", box=None)
    table.columns[-1].overflow = "fold"
    for model in list_models():
        table.add_row(model.name, model.description, str(model.directory or "not fetched"))
    out.print(table)


PANELS = (
    ("Run a cluster", (serve, demo, up, down)),
    ("Use it", (ask, explain, diagnose, timeline, status, doctor)),
    ("Try before you change", (compare, simulate, what_if, chaos)),
)
for panel, commands in PANELS:
    for command in commands:
        app.command(rich_help_panel=panel)(command)
GROUPS = (("config", config_app), ("scaling", scaling_app), ("model", model_app), ("key", key_app))
for name, group in GROUPS:
    app.add_typer(group, name=name, rich_help_panel="Files, decisions, models, keys")


def main() -> None:
    """Run the command line; never returns."""
    try:
        app(standalone_mode=True)
    except TwophaseError as error:
        err.print(f"twophase: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _fetch(name: str) -> Path:
    from deploy.model_store import fetch_model

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        return fetch_model(name, progress=progress)


@contextmanager
def _running(
    cluster: ClusterConfig, *, without_ray: bool, live: LiveConfig | None = None
) -> Iterator[str]:
    """Run the cluster while the context lasts; yields its address once a token went through."""
    directory = _fetch(cluster.model)
    cluster = cluster.model_copy(update={"model": _served_name(cluster.model, directory)})
    with err.status("starting") as spinner, _start(cluster, spinner, without_ray, live) as address:
        spinner.update("sending the first token through")
        wait_until_ready(address, cluster.security, READY_TIMEOUT_S)
        spinner.stop()
        yield address
        spinner.start()


@contextmanager
def _start(
    cluster: ClusterConfig, spinner: Status, without_ray: bool, live: LiveConfig | None
) -> Iterator[str]:
    if without_ray:
        from deploy.local_cluster import local_cluster

        with local_cluster(cluster, tell=spinner.update, replace_lost=True, live=live) as local:
            yield local.address
        return
    if "RAY_ADDRESS" not in os.environ:
        # Where Ray takes clusters of several machines for impossible, its servers listen on
        # loopback alone, which nothing else makes them do. It looks when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from deploy.cluster import ray_cluster

    with ray_cluster(cluster, tell=spinner.update, replace_lost=True, live=live) as address:
        yield address


def _reconfigure(address: str, cluster: ClusterConfig, router: RouterConfig) -> None:
    with own_client(address, cluster.security) as client:
        client.admin.reconfigure(router)


def _served_name(name: str, directory: Path) -> str:
    return str(directory) if Path(name).is_dir() else name


def _on_signals(signals: "queue.SimpleQueue[int]") -> None:
    """Queue what comes from now on; a second call to stop interrupts whatever runs."""
    stops: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if number != signal.SIGHUP:
            if stops:
                raise KeyboardInterrupt
            stops.append(number)
        signals.put(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)


def _next(signals: "queue.SimpleQueue[int]") -> int | None:
    """The next signal; None if none comes for a while."""
    try:
        return signals.get(timeout=LOOK_S)
    except queue.Empty:
        return None


def _http(address: str, cluster: ClusterConfig) -> str | None:
    """The URL of the router's HTTP endpoint; None if it has none."""
    with own_client(address, cluster.security) as client:
        http_address = client.status().http_address
    scheme = "http" if cluster.security.front_door_tls is None else "https"
    return f"{scheme}://{http_address}" if http_address else None


def _require_router(address: str) -> None:
    """Raise when the router does not listen any more."""
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LOOK_S):
            pass
    except ConnectionRefusedError as error:
        raise TwophaseError(f"the router at {address} has ended") from error
    except TimeoutError:
        pass  # busy, not gone


def _say_ready(address: str, http: str | None, cluster: ClusterConfig) -> None:
    """Where the cluster is, and what to do with it."""
    also = f", HTTP at [bold]{http}[/]" if http else ""
    out.print(f"[green]ready[/]: gRPC at [bold]{address}[/]{also}, mode {cluster.mode}")
    if http and cluster.router.page:
        _hint(f"see: {http}/ui")
    _hint(f'try: {own_name()} ask{_at(address)} "{DEMO_PROMPT}"')


def _at(address: str) -> str:
    return "" if address == DEFAULT_ADDRESS else f" --address {address}"


def own_name() -> str:
    """What a person types to call this program again: with its directory, unless PATH has it."""
    called = Path(sys.argv[0])
    is_found = called.name != "twophase" or shutil.which(called.name) is not None
    return "twophase" if is_found else str(called)


def _hint(text: str) -> None:
    out.print(escape(text), style="dim", highlight=False, soft_wrap=True)


def _stream(client: Client, prompt: Prompt, sampling: Sampling) -> Completion | None:
    """Print an answer as it comes, then its phases; what its last message told."""
    completion: Completion | None = None
    for chunk in client.generate(prompt, sampling):
        out.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
        completion = chunk.completion
    out.print()
    if completion is not None:
        out.print(phase_bar(completion).append("  ").append_text(phase_legend(completion)))
        out.print(summary(completion), style="dim", highlight=False)
        for failure in completion.failures:
            out.print(f"went on elsewhere after {failure}", style="yellow", highlight=False)
    return completion


if __name__ == "__main__":
    main()
