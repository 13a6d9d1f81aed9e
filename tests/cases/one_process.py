"""The whole product in one process: real workers, router, gRPC and backends, faults to order.

`OneProcessCluster` runs the servers of all roles as tasks of the test's event loop, as their own
processes would run them. The seams where bytes and control messages pass play one `Script`
(`tests.contract.faulty`), so a test orders faults while the cluster runs, at either end. Each
worker's engine is watched by a `Device`, which can also hold it before its next step.

One cluster at a time: the seams are module attributes.
"""

import asyncio
import dataclasses
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
import pytest

import decode_worker.server
import kv_link.link_pool
import prefill_worker.server
import router.server
from bench.parity import wait_until_ready
from core.completion import Completion
from core.config import load_config
from core.errors import TwophaseError
from core.link import Piece
from core.request import FinishReason, Logprobs
from decode_worker.config import DecodeWorkerConfig
from decode_worker.link import LinkServer
from kv_transfer.connection import connect, open_backend
from kv_transfer.memory import MemoryBackend
from kv_transfer.torch_backend import TorchBackend
from prefill_worker.config import PrefillWorkerConfig
from router.config import FrontDoorConfig
from tests.contract.faulty import FaultKind, FaultyReceiver, Script, Step, faulty_connect
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling
from twophase.peer import Duplex, Peer

LIMIT_S = 30.0
SOON_S = 10.0
TAKE_TIMEOUT_S = 0.5
SETUP = (
    *("router.port=0", "router.http_port=null"),
    # A failed handoff shall be seen, not mended by another try.
    "router.on_failure=fail",
    *("decode.kv_cache=4MiB", "prefill.kv_cache=4MiB", "engine.nice=0"),
)


def prompt_of(num_tokens, number):
    """Token ids that no prompt of another number begins with."""
    draw = random.Random(number)
    return [draw.randrange(3, 512) for _ in range(num_tokens)]


async def until(is_true, *, within_s=SOON_S):
    """Return once a fact of other tasks and threads holds; fails after `within_s`."""
    until_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < until_s, "it did not come to pass"
        await asyncio.sleep(0.002)


@dataclasses.dataclass
class Answer:
    """What a client got: tokens, and how it ended."""

    token_ids: list[int]
    completion: Completion | None = None
    error: TwophaseError | None = None
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)

    @property
    def is_stopped(self) -> bool:
        return self.completion is not None and self.completion.finish_reason is FinishReason.STOP


class Device:
    """Watches a runner: what it computed and sampled; `held` stops it before its next step.

    With `error` set, steps raise that instead.
    """

    def __init__(self, runner):
        self.num_steps = 0
        self.num_tokens = 0
        self.longest_share = 0
        self.sampled = []
        self.error = None
        self._step = runner.step
        self._may_step = threading.Event()
        self._may_step.set()
        runner.step = self._watch

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step begins while the context lasts."""
        self._may_step.clear()
        try:
            yield
        finally:
            self._may_step.set()

    def _watch(self, steps, on_layer=None):
        assert self._may_step.wait(LIMIT_S)
        self.num_steps += 1
        if self.error is not None:
            raise RuntimeError(self.error)
        result = self._step(steps, on_layer)
        self.num_tokens += sum(step.end - step.start for step in steps)
        self.longest_share = max(step.end - step.start for step in steps)
        self.sampled += [token_id for token_id in result.token_ids if token_id is not None]
        return result


class HeldChannel:
    """One direction of a control stream in an event loop: who is late holds up who is behind.

    RAISE is the end of the stream in the place of the message.
    """

    def __init__(self, send, script, end):
        self._send = send
        self._script = script
        self._end = end
        self._waiting = None

    def send(self, message):
        if self._waiting is not None:
            self._waiting.append(message)
            return
        fault = self._script.next(Step(type(message).__name__))
        kind = fault.kind if fault else None
        if kind is FaultKind.RAISE:
            self._end()
        elif kind is FaultKind.SLEEP:
            self._hold(fault.seconds, message)
        elif kind is FaultKind.CORRUPT:
            assert isinstance(message, Piece)
            self._send(dataclasses.replace(message, checksum=message.checksum ^ 1))
        elif kind is not FaultKind.DROP:
            self._send(message)
        if kind is FaultKind.DUPLICATE:
            self._send(message)
        if kind is FaultKind.DELAY:
            self._hold(fault.seconds)

    def _hold(self, seconds, *messages):
        self._waiting = []

        def go_on():
            waiting, self._waiting = self._waiting, None
            for message in messages:
                self._send(message)
            for message in waiting:
                self.send(message)

        asyncio.get_running_loop().call_later(seconds, go_on)


class OneProcessCluster:
    """A running cluster and what tests do with it."""

    def __init__(self, script: Script) -> None:
        self.faults = script
        self.address = ""
        self.workers: dict[str, str] = {}
        self.devices: dict[str, Device] = {}
        self.num_open_senders = 0
        self.client: AsyncClient
        self._streams = []

    async def ask(self, prompt, *, timeout_s=20.0, request_id="", **sampling) -> Answer:
        """One request to its end, whatever that is."""
        sampling.setdefault("ignore_eos", True)
        answer = Answer([])
        try:
            async for chunk in self.client.generate(
                prompt, Sampling(**sampling), timeout_s=timeout_s, request_id=request_id
            ):
                answer.token_ids += chunk.token_ids
                answer.logprobs += chunk.logprobs
                answer.completion = chunk.completion or answer.completion
        except TwophaseError as error:
            answer.error = error
        return answer

    async def post(self, path, **message):
        """A request to the HTTP endpoint; the whole reply."""
        address = (await self.client.status()).http_address
        async with httpx2.AsyncClient() as http:
            return await http.post(f"http://{address}/v1/{path}", json=message)

    async def statuses(self):
        """By name, what each worker holds."""
        return {worker.name: worker for worker in (await self.client.status()).workers}

    async def until_count(self, worker, count, is_right) -> None:
        """Return once a count of the worker's status is right."""
        async with asyncio.timeout(SOON_S):
            while not is_right(getattr((await self.statuses())[worker], count)):
                await asyncio.sleep(0.01)

    async def nothing_is_left(self) -> None:
        """The assertion that ends every test that makes requests."""
        await assert_nothing_left(self.address)

    def break_links(self) -> None:
        """End the control stream of every link, as a cut cable would."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def watch(self, stream) -> None:
        """A link was opened over `stream`, from prefill's end."""
        self._streams.append(stream)


@asynccontextmanager
async def one_process(
    model: Path, backend: str, *overrides: str, only_at_prefill: str | None = None
) -> AsyncIterator[OneProcessCluster]:
    """A ready cluster of `model` over `backend`: shm, torch, nixl, or memory, the double.

    only_at_prefill is a setting that nobody but the prefill workers was told, as when they were
    started by hand; the cluster may then never become ready, and is not waited for.
    """
    kind = "shm" if backend == "memory" else backend
    told = [f"model={model}", f"transfer.backend={kind}", *SETUP, *overrides]
    config = load_config(None, told)
    at_prefill = load_config(None, [*told, *filter(None, [only_at_prefill])])
    cluster = OneProcessCluster(Script())
    stop = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        _put_faults_in(patch, cluster, backend)
        running = asyncio.create_task(_run(config, at_prefill, cluster, stop))
        try:
            await _until_listening(cluster, running)
            async with AsyncClient(cluster.address) as cluster.client:
                if only_at_prefill is None:
                    await wait_until_ready(cluster.client)
                yield cluster
        finally:
            cluster.faults.order()
            stop.set()
            await asyncio.wait_for(running, LIMIT_S)


async def _run(config, at_prefill, cluster, stop):
    """All servers until `stop`: workers first, then the router, which also stops before them."""
    stop_workers = asyncio.Event()
    async with asyncio.TaskGroup() as servers:

        async def start(serve, server_config, its_stop):
            address = asyncio.get_running_loop().create_future()
            server = servers.create_task(serve(server_config, its_stop, address.set_result))
            return server, await address

        for replica in range(config.decode.replicas):
            own = DecodeWorkerConfig.from_cluster(config, replica=replica)
            _, cluster.workers[own.name] = await start(_serve_decode, own, stop_workers)
        for replica in range(config.prefill.replicas):
            own = PrefillWorkerConfig.from_cluster(at_prefill, replica=replica)
            _, cluster.workers[own.name] = await start(_serve_prefill, own, stop_workers)
        front = config.router.model_copy(update={"workers": tuple(cluster.workers.values())})
        own = FrontDoorConfig.from_cluster(config.model_copy(update={"router": front}))
        front_door, cluster.address = await start(_serve_router, own, stop)
        await asyncio.wait([front_door])
        stop_workers.set()


async def _serve_decode(config, stop, on_ready):
    await decode_worker.server.serve(config, stop=stop, on_ready=on_ready)


async def _serve_prefill(config, stop, on_ready):
    await prefill_worker.server.serve(config, stop=stop, on_ready=on_ready)


async def _serve_router(config, stop, on_ready):
    await router.server.serve(config, stop=stop, on_listening=on_ready)


async def _until_listening(cluster, running):
    until_s = time.monotonic() + LIMIT_S
    while not cluster.address:
        assert time.monotonic() < until_s
        if running.done():
            await running
        await asyncio.sleep(0.01)


def _put_faults_in(patch, cluster, backend):
    memory = MemoryBackend(take_timeout_s=TAKE_TIMEOUT_S)
    script = cluster.faults

    def open_faulty(kind, *, host):
        opened = {
            "memory": lambda: memory,
            "torch": lambda: TorchBackend(host=host, take_timeout_s=TAKE_TIMEOUT_S),
        }.get(backend, lambda: open_backend(kind, host=host))()
        offer = opened.offer

        def offer_faulty(link_id, cache_L2NSKD):
            offered, receiver = offer(link_id, cache_L2NSKD)
            return offered, FaultyReceiver(receiver, script)

        opened.offer = offer_faulty
        return opened

    class FaultyPeer(Peer):
        def link(self):
            stream = super().link()
            cluster.watch(stream)
            # A stream that was given up is not kept by what is put in its way.
            given = weakref.ref(stream)
            stream.send = HeldChannel(
                lambda message: given() and Duplex.send(given(), message),
                script,
                lambda: given() and given().close(),
            ).send
            return stream

    class FaultyLinkServer(LinkServer):
        async def serve(self, messages, say):
            await super().serve(messages, HeldChannel(say, script, cluster.break_links).send)

    def connect_counted(*arguments):
        sender = (memory.connect if backend == "memory" else connect)(*arguments)
        cluster.num_open_senders += 1
        close = sender.close

        def close_counted():
            cluster.num_open_senders -= 1
            sender.close = close
            close()

        sender.close = close_counted
        return sender

    patch.setattr(decode_worker.server, "open_backend", open_faulty)
    patch.setattr(decode_worker.server, "LinkServer", FaultyLinkServer)
    patch.setattr(kv_link.link_pool, "connect", faulty_connect(connect_counted, script))
    patch.setattr(kv_link.link_pool, "Peer", FaultyPeer)
    for module, role in ((decode_worker.server, "decode"), (prefill_worker.server, "prefill")):
        patch.setattr(
            module, "running_engine", _watched_engine(module.running_engine, cluster, role)
        )


def _watched_engine(running_engine, cluster, role):
    @contextmanager
    def run(*arguments):
        with running_engine(*arguments) as runner:
            number = sum(name.startswith(role) for name in cluster.devices)
            cluster.devices[f"{role}-{number}"] = Device(runner)
            yield runner

    return run
