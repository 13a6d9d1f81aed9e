"""Puts one decode worker together and runs it until it is told to stop."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from core.clock import MonotonicClock
from core.model_path import find_model
from core.worker import Role, WorkerInfo
from decode_worker.config import DecodeWorkerConfig
from decode_worker.link import LinkServer
from decode_worker.scheduler import Scheduler
from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker, Limits
from engine.block_pool import BlockPool
from engine.device_thread import device_thread
from engine.runner import Runner
from kv_transfer.backend import BackendKind, ReceiverBackend
from kv_transfer.connection import open_backend
from twophase.server import running_server
from twophase.v1 import worker_pb2_grpc as pb_grpc

STOP_GRACE_S = 5.0


async def serve(
    config: DecodeWorkerConfig, *, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Load the model, listen, call `on_ready` with host:port, and serve until `stop` is set.

    Raises:
        ModelError, ConfigError: the worker cannot start.
    """
    device = device_thread(
        nice=config.engine.nice, num_threads=config.pool.num_threads, cores=config.cores
    )
    backends = _open_backends(config)
    try:
        runner = await asyncio.get_running_loop().run_in_executor(device, _load, config, backends)
        await _serve(config, runner, backends, device=device, stop=stop, on_ready=on_ready)
    finally:
        for backend in backends.values():
            backend.close()
        device.shutdown()


def _open_backends(config: DecodeWorkerConfig) -> dict[BackendKind, ReceiverBackend]:
    """Every backend that a link of this worker may choose."""
    host = config.listen.rpartition(":")[0]
    kinds = [BackendKind.SHM, BackendKind.TORCH]
    if config.transfer.backend != "auto":
        kinds = [BackendKind(config.transfer.backend)]
    return {kind: open_backend(kind, host=host) for kind in kinds}


def _load(config: DecodeWorkerConfig, backends: dict[BackendKind, ReceiverBackend]) -> Runner:
    shared = backends.get(BackendKind.SHM)
    runner = Runner(
        find_model(config.model),
        dtype=config.engine.dtype,
        block_size=config.engine.block_size,
        kv_cache_bytes=config.pool.kv_cache,
        num_threads=config.pool.num_threads,
        allocate=shared.allocate if shared is not None else None,
        max_context_tokens=config.engine.max_context_tokens,
    )
    runner.warm_up()
    return runner


async def _serve(
    config: DecodeWorkerConfig,
    runner: Runner,
    backends: dict[BackendKind, ReceiverBackend],
    *,
    device: ThreadPoolExecutor,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    clock = MonotonicClock()
    info = WorkerInfo(
        name=config.name,
        role=Role.DECODE,
        incarnation=uuid.uuid4().hex,
        model=config.model,
        layout=runner.layout,
        num_blocks=runner.num_blocks,
        max_context_tokens=runner.max_context_tokens,
        vocab_size=runner.config.vocab_size,
        max_num_sequences=config.pool.max_num_sequences,
        attention=f"{runner.attention_name}: {runner.attention_reason}",
    )
    scheduler = Scheduler(
        config.mode,
        max_batch_tokens=config.pool.max_batch_tokens,
        max_num_sequences=config.pool.max_num_sequences,
    )
    limits = Limits(runner.max_context_tokens, config.pool.max_waiting_requests)
    pool = BlockPool(runner.num_blocks, config.engine.block_size)
    worker = DecodeWorker(info, pool, scheduler, limits)
    links = LinkServer(
        info,
        worker,
        runner.cache.kv_L2NSKD,
        backends,
        config=config.transfer,
        clock=clock,
    )
    service = DecodeService(info, worker, runner, links, device=device, clock=clock)
    async with running_server(config.listen, stop_grace_s=STOP_GRACE_S) as server:
        pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
        pb_grpc.add_DecodeWorkerServicer_to_server(service, server.grpc)
        worker.address = await server.start()
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(service.run_device()),
                tasks.create_task(service.run_ticks()),
            ]
            on_ready(worker.address)
            await stop.wait()
            await server.stop()
            for loop in loops:
                loop.cancel()
