"""Puts one prefill worker together and runs it until it is told to stop."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from core import telemetry
from core.clock import MonotonicClock
from core.events.step_log import StepRecorder
from core.model_path import find_model
from core.worker import Role, WorkerInfo
from engine.block_pool import BlockPool
from engine.device_thread import device_thread
from engine.leader import EngineSettings, running_engine
from engine.runner import Runner
from kv_link.link_pool import Identity, LinkPool
from kv_transfer.cuda.nccl_pair import forbid_watchdog
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker
from twophase.credentials import internal_access, internal_credentials
from twophase.server import running_server
from twophase.v1 import worker_pb2_grpc as pb_grpc

STOP_GRACE_S = 5.0


async def serve(
    config: PrefillWorkerConfig, *, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Load the model, listen, call `on_ready` with host:port, and serve until `stop` is set.

    Raises:
        ModelError, ConfigError: the worker cannot start.
        PeerLost: one of its ranks did not start, or was lost.
    """
    internal_access(config.security).require_may_listen(config.listen, "listen")
    settings = EngineSettings.of(
        find_model(config.model), config.engine, config.pool, cores=config.cores, gpus=config.gpus
    )
    if config.engine.device != "cpu" and config.pool.tensor_parallel == 1:
        forbid_watchdog()
    device = device_thread(
        nice=settings.nice, num_threads=settings.num_threads, cores=settings.cores_of(0)
    )
    with ExitStack() as stack:
        stack.callback(device.shutdown)
        runner = await asyncio.get_running_loop().run_in_executor(
            device, stack.enter_context, running_engine(settings)
        )
        # A step that is still running uses all of this: it ends first.
        stack.callback(lambda: device.submit(int).result())
        await _serve(config, runner, device, stop=stop, on_ready=on_ready)


async def _serve(
    config: PrefillWorkerConfig,
    runner: Runner,
    device: ThreadPoolExecutor,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    access = internal_access(config.security)
    clock = MonotonicClock()
    info = WorkerInfo(
        name=config.name,
        role=Role.PREFILL,
        incarnation=uuid.uuid4().hex,
        model=config.model,
        layout=runner.layout,
        num_blocks=runner.num_blocks,
        max_context_tokens=runner.max_context_tokens,
        vocab_size=runner.config.vocab_size,
        max_num_sequences=0,
        kernels=runner.kernels,
    )
    worker = PrefillWorker(
        BlockPool(runner.num_blocks, runner.layout.block_size),
        block_size=runner.layout.block_size,
        max_batch_tokens=config.pool.max_batch_tokens,
        max_waiting=config.pool.max_waiting_requests,
    )
    worker.tally.total(telemetry.MODEL_LOAD).value = runner.load_s
    if config.engine.step_log is not None:
        worker.recorder = StepRecorder(config.engine.step_log, config.name)
    identity = Identity(info.name, info.incarnation, info.layout)
    async with LinkPool(
        identity,
        runner.cache,
        config.transfer,
        clock,
        credentials=internal_credentials(config.security),
        chaos=config.chaos,
    ) as links:
        service = PrefillService(info, worker, runner, links, device=device, clock=clock)
        async with running_server(config.listen, access, stop_grace_s=STOP_GRACE_S) as server:
            pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
            pb_grpc.add_PrefillWorkerServicer_to_server(service, server.grpc)
            service.address = await server.start()
            async with asyncio.TaskGroup() as tasks:
                steps = tasks.create_task(service.run_device())
                on_ready(service.address)
                await stop.wait()
                await service.drain(config.drain_s)
                await server.stop()
                steps.cancel()
    if worker.recorder is not None:
        worker.recorder.write()
