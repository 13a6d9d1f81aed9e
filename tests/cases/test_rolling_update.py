"""Workers of the next protocol version come one by one, under load: pairs of one version serve."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from bench.parity import wait_until_ready
from core.config import load_config
from core.layout import PROTOCOL_VERSION, KVLayout
from decode_worker.config import DecodeWorkerConfig
from decode_worker.server import serve as serve_decode
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.server import serve as serve_prefill
from router.config import FrontDoorConfig
from router.server import serve as serve_router
from tests.cases.one_process import LIMIT_S, SOON_S, prompt_of
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Sampling

NUM_STREAMS, NUM_PROMPTS, NUM_TOKENS = 4, 12, 30
SETUP = ("router.port=0", "router.http_port=null", "decode.kv_cache=4MiB", "prefill.kv_cache=4MiB")
NEXT = PROTOCOL_VERSION + 1


class Update:
    """Workers of two versions around one router, which come and go as the test says."""

    def __init__(self, model, servers):
        self.config = load_config(None, [f"model={model}", *SETUP, "engine.nice=0"])
        self.client = None
        self._servers = servers
        self._stops = {}
        self._addresses = {}

    async def start(self, name, serve, config, ready):
        stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
        told = {ready: address.set_result}
        self._stops[name] = stop, self._servers.create_task(serve(config, stop=stop, **told))
        self._addresses[name] = await address

    async def join(self, name, version):
        """Start a worker that speaks this version of the protocol."""
        role, _, number = name.partition("-")
        kind, serve = {
            "decode": (DecodeWorkerConfig, serve_decode),
            "prefill": (PrefillWorkerConfig, serve_prefill),
        }[role]
        own = kind.from_cluster(self.config, replica=int(number))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVLayout.__init__, "__defaults__", (1, version))
            await self.start(name, serve, own, "on_ready")
        await self.client.add_worker(self._addresses[name])
        async with asyncio.timeout(SOON_S):
            while "warming" in {worker.state for worker in await self.client.admin.workers()}:
                await asyncio.sleep(0.01)

    async def leave(self, name):
        """Have a worker finish what it has, and end."""
        await self.client.admin.drain(name)
        await self.stop(name)
        await self.client.remove_worker(self._addresses[name])

    async def stop(self, name):
        stop, server = self._stops.pop(name)
        stop.set()
        await asyncio.wait_for(server, LIMIT_S)

    async def end(self):
        for name in reversed([*self._stops]):
            await self.stop(name)


@asynccontextmanager
async def updating(model):
    async with asyncio.TaskGroup() as servers:
        update = Update(model, servers)
        front = FrontDoorConfig.from_cluster(update.config)
        await update.start("router", serve_router, front, "on_listening")
        async with AsyncClient(update._addresses["router"]) as update.client:
            yield update
        await update.end()


async def load(client, until, reference):
    """Streams without a pause, each with the right tokens; where each was served."""
    served, number = [], 0
    while not until.is_set():
        prompt = prompt_of(40, number % NUM_PROMPTS)
        answer = await client.generate_once(prompt, Sampling(NUM_TOKENS, ignore_eos=True))
        assert list(answer.token_ids) == reference(prompt, NUM_TOKENS)
        done = answer.completion
        served.append((done.prefill_worker, done.decode_worker))
        number += 1
    return served


@pytest.mark.case("B-161")
async def test_pairs_of_one_version_serve_all_the_time_and_mixed_ones_are_refused(
    model, reference, caplog
):
    caplog.set_level("INFO")
    for number in range(NUM_PROMPTS):  # computed here, they would hold up the cluster's loop
        reference(prompt_of(40, number), NUM_TOKENS)
    async with updating(model) as update:
        # 1 both of the present version
        await update.join("decode-0", PROTOCOL_VERSION)
        await update.join("prefill-0", PROTOCOL_VERSION)
        await wait_until_ready(update.client)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(load(update.client, is_over, reference))
                for _ in range(NUM_STREAMS)
            ]
            # 2 one of the next: no pair for it, and the reason is told; then its partner
            await update.join("decode-1", NEXT)
            await update.join("prefill-1", NEXT)
            # 3 those of the present version leave; what they have, they finish
            await update.leave("prefill-0")
            await update.leave("decode-0")
            await update.client.generate_once(prompt_of(40, 99), Sampling(NUM_TOKENS))
            is_over.set()
        served = {pair for stream in streams for pair in stream.result()}
        await assert_nothing_left(update._addresses["router"])

    # While nothing but decode of the next version is left, it reads prompts by itself at most.
    assert ("prefill-0", "decode-0") in served
    assert ("prefill-1", "decode-1") in served
    assert not served & {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}
    refused = f"protocol_version {PROTOCOL_VERSION} != {NEXT}"
    assert any(
        "no token from prefill-0 to decode-1" in line and refused in line
        for line in caplog.text.splitlines()
    )
