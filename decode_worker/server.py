"""Puts one decode worker together and runs it until it is told to stop."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from core import telemetry
from core.clock import Clock, MonotonicClock
from core.events.step_log import StepRecorder
from core.model_path import find_model
from core.worker import Role, WorkerInfo
from decode_worker.config import DecodeWorkerConfig
from decode_worker.limits import Limits
from decode_worker.link import LinkServer
from decode_worker.migration import Migrations
from decode_worker.recording import recording_of
from decode_worker.scheduler import Scheduler
from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from engine.block_pool import BlockPool
from engine.device_thread import device_thread
from engine.leader import Allocate, EngineSettings, running_engine
from engine.runner import Runner
from engine.shared_memory import SharedMemory
from kv_link.link_pool import Identity, LinkPool
from kv_transfer.backend import BackendKind, ReceiverBackend
from kv_transfer.connection import has_rdma, open_backend
from kv_transfer.cuda.nccl_pair import forbid_watchdog
from kv_transfer.nixl import agent as nixl_agent
from kv_transfer.shm import ShmBackend
from twophase.credentials import internal_access, internal_credentials
from twophase.server import running_server
from twophase.v1 import worker_pb2_grpc as pb_grpc

STOP_GRACE_S = 5.0


async def serve(
    config: DecodeWorkerConfig, *, stop: asyncio.Event, on_ready: Callable[[str], None]
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
    device = device_thread(
        nice=settings.nice, num_threads=settings.num_threads, cores=settings.cores_of(0)
    )
    with ExitStack() as stack:
        stack.callback(device.shutdown)
        backends = _open_backends(config)
        for backend in backends.values():
            stack.callback(backend.close)
        runner = await asyncio.get_running_loop().run_in_executor(
            device, stack.enter_context, running_engine(settings, _lender(backends))
        )
        # A step that is still running uses all of this: it ends first.
        stack.callback(lambda: device.submit(int).result())
        await _serve(config, runner, backends, device=device, stop=stop, on_ready=on_ready)


def _open_backends(config: DecodeWorkerConfig) -> dict[BackendKind, ReceiverBackend]:
    """Every backend that a link of this worker may choose."""
    host = config.listen.rpartition(":")[0]
    is_on_card = config.engine.device != "cpu"
    kinds = [BackendKind.IPC if is_on_card else BackendKind.SHM, BackendKind.TORCH]
    if nixl_agent.is_installed() and (is_on_card or has_rdma()):
        kinds.append(BackendKind.NIXL)
    if is_on_card and config.pool.tensor_parallel == 1:
        forbid_watchdog()
    if config.transfer.backend != "auto":
        kinds = [BackendKind(config.transfer.backend)]
    return {kind: open_backend(kind, host=host) for kind in kinds}


def _lender(backends: dict[BackendKind, ReceiverBackend]) -> Allocate | None:
    """Where the KV cache lies: in shm's memory if that may be chosen."""
    shared = backends.get(BackendKind.SHM)
    if not isinstance(shared, ShmBackend):
        return None

    def allocate(num_bytes: int) -> SharedMemory:
        storage = shared.allocate(num_bytes)
        return SharedMemory(storage, shared.fd)

    return allocate


async def _serve(
    config: DecodeWorkerConfig,
    runner: Runner,
    backends: dict[BackendKind, ReceiverBackend],
    *,
    device: ThreadPoolExecutor,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    access = internal_access(config.security)
    clock = MonotonicClock()
    worker = _worker(config, runner)
    cache = runner.cache.kv_L2NSKD
    links = LinkServer(worker.info, worker, cache, backends, config=config.transfer, clock=clock)
    out = _links_out(config, worker.info, runner, clock)
    async with (
        out,
        running_server(config.listen, access, stop_grace_s=STOP_GRACE_S) as server,
    ):
        migrations = Migrations(worker, out, clock)
        service = DecodeService(worker, runner, links, migrations, device=device, clock=clock)
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
            await service.drain(config.drain_s)
            await server.stop()
            for loop in loops:
                loop.cancel()
    if worker.recording.recorder is not None:
        worker.recording.recorder.write()


def _worker(config: DecodeWorkerConfig, runner: Runner) -> DecodeWorker:
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
        kernels=runner.kernels,
    )
    scheduler = Scheduler(
        config.mode,
        max_batch_tokens=config.pool.max_batch_tokens,
        max_num_sequences=config.pool.max_num_sequences,
    )
    limits = Limits(runner.max_context_tokens, config.pool.max_waiting_requests)
    pool = BlockPool(runner.num_blocks, runner.layout.block_size)
    worker = DecodeWorker(info, pool, scheduler, limits)
    step_log = config.engine.step_log
    worker.recording = recording_of(
        is_on=config.telemetry.enabled,
        token_bytes=runner.layout.token_bytes,
        recorder=StepRecorder(step_log, config.name) if step_log is not None else None,
    )
    worker.recording.counts.tally.total(telemetry.MODEL_LOAD).value = runner.load_s
    return worker


def _links_out(
    config: DecodeWorkerConfig, info: WorkerInfo, runner: Runner, clock: Clock
) -> LinkPool:
    """Links to other decode workers, for when this one stops."""
    return LinkPool(
        Identity(info.name, info.incarnation, info.layout),
        runner.cache,
        config.transfer,
        clock,
        credentials=internal_credentials(config.security),
        chaos=config.chaos,
    )
