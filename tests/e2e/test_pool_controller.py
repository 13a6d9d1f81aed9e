"""A cluster on a Ray cluster that runs already: adopted, kept, scaled and ended by name."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

from core.config import load_config
from core.errors import ConfigError
from core.settings.scaling import DecodeScaling
from core.worker import Role
from deploy.actors.joined_cluster import start_cluster, stop_cluster
from deploy.actors.name import CONTROLLER, NAMESPACE, actor_name
from deploy.actors.node_pool import NodePool, servers_of
from deploy.actors.place import groups_of
from deploy.autoscaler.record import GiveUp, Start
from deploy.live_config import LiveConfig
from tests.unit.deploy.scaling_facts import demand_of
from tests.unit.deploy.test_scaler import BUSY, World
from twophase.client import Client, Sampling

LATE_S = 90.0
NUM_CPUS = 3
SETUP = (
    *("router.port=0", "router.http_port=0", "router.max_wait_s=60"),
    *("prefill.kv_cache=4MiB", "decode.kv_cache=4MiB"),
)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """Ray on loopback with three CPUs, whatever there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            namespace=NAMESPACE,
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LATE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within {LATE_S:g} s"
        time.sleep(0.05)


def answer(client: Client) -> tuple[int, ...]:
    return client.generate_once((1, 2, 3), Sampling(max_tokens=8, ignore_eos=True)).token_ids


def pids(client: Client) -> dict[str, int]:
    return {worker.name: worker.pid for worker in client.status().workers}


def pid_of(actor: Any) -> int | None:
    """The process of an actor; None while it is lost."""
    try:
        return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
    except ray.exceptions.RayActorError:
        return None


def demanded_nodes() -> list[dict[str, Any]]:
    """What Ray's autoscaler is asked to make room for."""
    asked = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or "[]")
    return [bundle.get("resources", bundle) for bundle in asked]


@pytest.mark.timeout(240)
def test_workers_outlive_their_controller_and_come_back_elsewhere_until_down(
    tiny_model_directory: Path, ray_here: None
) -> None:
    config = load_config(None, [f"model={tiny_model_directory}", *SETUP])
    known = set(psutil.Process().children(recursive=True))
    router = start_cluster("main", config)
    # 1 whoever comes later finds it by name, and nobody gets another one by that name
    assert start_cluster("main", config) == router
    with pytest.raises(ConfigError, match="'main' runs with another configuration.*kv_cache"):
        start_cluster("main", load_config(None, [f"model={tiny_model_directory}"]))
    #   except for what may change while it runs
    changed = load_config(None, [f"model={tiny_model_directory}", *SETUP, "router.max_queue_s=7"])
    told: list[str] = []
    assert start_cluster("main", changed, told.append) == router
    assert told == ["the configuration changed: router.max_queue_s 60.0 -> 7.0"]
    assert servers_of("main") == ["controller", "decode-0", "prefill-0", "router"]
    with Client(router) as client:
        tokens, before = answer(client), pids(client)
        # 2 the controller is lost, and a worker with it, whose place nobody gives back: the next
        # one adopts who lives and starts who is missing
        controller: Any = ray.get_actor(actor_name("main", CONTROLLER), NAMESPACE)
        first = pid_of(controller)
        ray.kill(controller, no_restart=False)
        os.kill(before["prefill-0"], signal.SIGKILL)
        wait_until(lambda: pid_of(controller) not in (first, None), "another controller")
        assert ray.get(controller.start.remote()) == router
        assert ray.get(controller.config.remote()) == changed
        prefill = before.pop("prefill-0")
        wait_until(lambda: pids(client).get("prefill-0", prefill) != prefill, "another worker")
        assert pids(client)["decode-0"] == before["decode-0"]
        assert answer(client) == tokens
        # 3 it keeps them: a lost worker is followed by one that listens at a port of its own
        decode = before["decode-0"]
        os.kill(decode, signal.SIGKILL)
        wait_until(lambda: pids(client).get("decode-0", decode) != decode, "another worker")
        assert answer(client) == tokens
    listening = {
        connection.laddr.ip
        for process in set(psutil.Process().children(recursive=True)) - known
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    # 4 down: nothing of it is left
    assert stop_cluster("main") == 3
    assert servers_of("main") == [] and groups_of("main") == []
    assert _internal_kv_list("twophase config", namespace=NAMESPACE) == []
    assert stop_cluster("main") == 0


@pytest.mark.case("B-131")
@pytest.mark.timeout(240)
def test_a_worker_that_no_node_has_room_for_is_withdrawn_and_the_other_pool_grows(
    tiny_model_directory: Path, ray_here: None
) -> None:
    config = load_config(
        None,
        [
            *(f"model={tiny_model_directory}", *SETUP, "prefill.resources.cpus=8"),
            *("scaling.prefill={}", "scaling.ask_for_nodes=true"),
        ],
    )
    pool = NodePool("full", LiveConfig(config))
    world = World("prefill-0", "decode-0", decode=DecodeScaling(max_replicas=2))
    started = []

    def create(role: Role, index: int, address: str | None) -> Any:
        started.append(pool.worker(role, index))
        return started[-1]

    world.scaler._create = create
    world.router.demand = BUSY
    assert world.look(seconds=61.0).actions == (Start(Role.PREFILL, 3),)
    assert [group["state"] for group in groups_of("full")] == ["PENDING"] * 3
    assert demanded_nodes() == [{"CPU": 8.0}] * 3
    given_up = world.look().actions[0]
    assert given_up == GiveUp(("prefill-1", "prefill-2", "prefill-3"))
    wait_until(lambda: groups_of("full") == [], "places given back")
    assert demanded_nodes() == []

    world.router.demand = demand_of(requests_per_s=1.0, prompt=10.0, decode_s=60.0)
    assert Start(Role.DECODE, 1) in world.look().actions
    assert demanded_nodes() == [{"CPU": 1.0}]
    kind, address = world.router.said.get(timeout=LATE_S)
    assert (kind, address) == ("add", started[-1].address)
    for slot in started:
        slot.stop(LATE_S)
    assert servers_of("full") == [] and demanded_nodes() == []
