"""Puts the router together and runs it until it is told to stop.

Stopping: not ready first, then no new requests, then running ones end within the drain limit.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.clock import MonotonicClock
from core.model_path import find_model
from core.settings.router import OnDrain
from router.admin_service import AdminService
from router.codec import Codec
from router.config import FrontDoorConfig
from router.dispatch import Dispatcher
from router.generation import FrontDoor, Generation
from router.http.app import HttpApp
from router.http.defaults import checkpoint_defaults
from router.http.keys import KeyCheck
from router.http.server import HttpServer
from router.keys import front_door_access
from router.members.fleet import Fleet
from router.message_limit import message_limit_of
from router.page.routes import Page
from router.readiness import Readiness
from router.running import RunningRequests
from router.service import InferenceService
from router.telemetry.exposition import NoTelemetry, Telemetry
from router.telemetry.gauges import Gauges
from router.telemetry.history import History
from router.telemetry.measured import Measured
from router.telemetry.recorder import Recorder
from router.telemetry.totals import KvCounters
from router.text.tokenizer import Tokenizer
from router.tracing.traces import running_traces
from twophase.credentials import internal_credentials
from twophase.server import Server, running_server
from twophase.v1 import admin_pb2_grpc, inference_pb2_grpc

INFERENCE = "twophase.v1.Inference"
ADMIN = "twophase.v1.Admin"
PROBE_TEXT = "Hello"
# For statuses and last messages on their way.
LAST_WORD_S = 1.0


async def serve(
    config: FrontDoorConfig, *, stop: asyncio.Event, on_listening: Callable[[str], None]
) -> None:
    """Listen, call `on_listening` with host:port, and serve until `stop` is set.

    The endpoint answers before it is ready; health tells when a token can flow.

    Raises:
        ModelError, ConfigError: the router cannot start.
    """
    access, keys = front_door_access(config.security, config.listen)
    clock = MonotonicClock()
    directory = find_model(config.model)
    tokenizer = await asyncio.to_thread(Tokenizer.load, directory)
    http_defaults = checkpoint_defaults(directory)
    counters = KvCounters()
    async with (
        running_traces(config.tracing, clock) as traces,
        Fleet(
            clock,
            worker_timeout_s=config.router.worker_timeout_s,
            wedged_after_s=config.router.wedged_after_s,
            warm_s=config.router.warm_s,
            may_migrate=config.router.on_drain is OnDrain.MIGRATE,
            credentials=internal_credentials(config.security),
        ) as fleet,
        Dispatcher(fleet, config.dispatch, counters, clock) as dispatcher,
        running_server(
            config.listen,
            access,
            stop_grace_s=config.router.drain_s,
            max_message_bytes=config.router.max_message or message_limit_of(directory, tokenizer),
        ) as server,
    ):
        health_service = health.aio.HealthServicer()

        async def announce(is_ready: bool) -> None:
            status = health_pb2.HealthCheckResponse.ServingStatus
            await health_service.set(INFERENCE, status.SERVING if is_ready else status.NOT_SERVING)
            if is_ready:
                generation.limits()  # remembered for when no worker is there

        await announce(False)
        readiness = Readiness(
            fleet,
            dispatcher,
            tokenizer.encode(PROBE_TEXT),
            mode=config.mode,
            announce=announce,
            clock=clock,
        )
        running = RunningRequests(config.router.max_active_requests, clock)
        door = FrontDoor(
            readiness,
            counters,
            running,
            History(config.router.history if config.telemetry.enabled else 0, clock),
            traces,
            Measured(Telemetry() if config.telemetry.enabled else NoTelemetry()),
            recorder=Recorder(config.router.record) if config.router.record else None,
        )
        generation = Generation(fleet, dispatcher, tokenizer, door, config=config, clock=clock)
        codec = Codec(tokenizer, generation.limits)
        inference = InferenceService(generation, codec, door.running, config=config, clock=clock)
        gauges = Gauges(fleet, dispatcher, door, clock, config.mode)
        http_app = HttpApp(
            generation,
            readiness,
            config.model,
            http_defaults,
            clock,
            gauges.exposition,
            more_routes=Page(fleet, dispatcher, door, config=config, clock=clock).routes(),
        )
        http = HttpServer(
            KeyCheck(http_app.asgi(), keys.require_user, keys.require_admin),
            host=config.router.host,
            port=config.router.http_port,
            grace_s=config.router.drain_s,
            tls=access.tls,
        )
        with http.bound() as http_address, door.recorder or nullcontext():
            admin = AdminService(
                fleet, dispatcher, door, config=config, http_address=http_address, clock=clock
            )
            _add_services(server.grpc, inference, admin, health_service)
            address = await server.start()
            if http_address:
                logging.getLogger("twophase.router").info("HTTP at http://%s", http_address)
            for worker in config.router.workers:
                fleet.add(worker)
            async with asyncio.TaskGroup() as tasks:
                probing = tasks.create_task(readiness.run())
                tasks.create_task(http.serve())
                on_listening(address)
                await stop.wait()
                await health_service.enter_graceful_shutdown()
                http.stop()
                await _drain(server, door.running)
                probing.cancel()


async def _drain(server: Server, running: RunningRequests) -> None:
    """Take nothing new, and end once no request is inside, or the grace is over.

    Calls that serve no request, such as a watch of the health, hold up nobody.
    """
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.stop())
        await running.emptied()
        await server.grpc.stop(LAST_WORD_S)


def _add_services(
    server: grpc.aio.Server,
    inference: InferenceService,
    admin: AdminService,
    health_service: health.aio.HealthServicer,
) -> None:
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (INFERENCE, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
