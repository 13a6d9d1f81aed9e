"""Pure parts of a cluster on other nodes: where workers go, what a new controller does, names."""

import socket

import pytest
import ray

from core.config import load_config
from core.errors import ConfigError
from core.settings.resources import Strategy
from decode_worker.config import DecodeWorkerConfig
from deploy.actors.joined_cluster import require_placeable
from deploy.actors.membership import joined
from deploy.actors.name import actor_name, require_cluster_name, server_of_name
from deploy.actors.node_choice import Need, Node, Wish, require_room, wish_of
from deploy.actors.node_server import at_node
from deploy.actors.reconciliation import Reconciliation, reconcile, sizes_of
from deploy.cluster import ray_cluster
from router.config import FrontDoorConfig

FIXED = sizes_of(load_config(None, ["prefill.replicas=1", "decode.replicas=2"]))
SCALED = sizes_of(
    load_config(
        None,
        [
            *("scaling.prefill={max_replicas: 2}", "scaling.decode={max_replicas: 3}"),
            *("prefill.replicas=2", "decode.replicas=2"),
        ],
    )
)


def need_of(*overrides):
    config = load_config(None, list(overrides))
    return Need.of(config.decode, config.engine.device)


def test_a_worker_takes_its_threads_and_cards_unless_it_is_told_otherwise():
    ranks = "decode.tensor_parallel=2"
    assert need_of(ranks, "decode.num_threads=3").bundle == {"CPU": 6.0}
    assert need_of("engine.device=cuda", "mode=chunked", ranks).bundle == {"CPU": 2.0, "GPU": 2.0}
    told = "decode.resources={cpus: 0.5, custom: {rdma: 1}, strategy: SPREAD}"
    assert need_of(told) == Need({"CPU": 0.5, "rdma": 1.0}, Strategy.SPREAD)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("decode.resources.gpus=1", "decode.resources.gpus: has no effect with engine.device cpu"),
        ("decode.resources.custom={GPU: 1}", "'GPU' is not a name of your own"),
        ("decode.resources.cpus=0", "decode.resources.cpus: "),
        ("decode.resources.strategy=STRICT_PACK", "decode.resources.strategy: "),
        ("decode.resources.custom={rdma: 0}", "decode.resources.custom.rdma: "),
    ],
)
def test_resources_that_cannot_be_are_refused(override, said):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [override])
    assert said in str(refused.value)


def test_fewer_cards_than_ranks_are_refused():
    words = ["engine.device=cuda", "mode=chunked", "decode.tensor_parallel=2"]
    with pytest.raises(ConfigError, match="is 1, less than the 2 ranks of a worker take"):
        load_config(None, [*words, "decode.resources.gpus=1"])


def nodes(*num_workers, cpus=4.0):
    return [Node(f"n{i}", {"CPU": cpus}, number) for i, number in enumerate(num_workers)]


@pytest.mark.parametrize(
    ("strategy", "there", "wish"),
    [
        (Strategy.PACK, nodes(0, 0), Wish()),
        (Strategy.PACK, nodes(0, 1, 2), Wish(best="n2")),
        (Strategy.SPREAD, nodes(1, 0, 2), Wish(best="n1")),
        (Strategy.SPREAD, nodes(1, 0, cpus=1.0), Wish()),
        (Strategy.STRICT_SPREAD, nodes(1, 0, 2), Wish(excluded=("n0", "n2"))),
        (Strategy.STRICT_SPREAD, [], Wish()),
    ],
)
def test_the_next_worker_goes_where_the_strategy_says(strategy, there, wish):
    assert wish_of(Need({"CPU": 2.0}, strategy), there) == wish


def test_a_cluster_has_room_if_all_its_first_workers_fit_together():
    config = load_config(None, ["prefill.replicas=2", "decode.replicas=2", "decode.num_threads=3"])
    require_room(config, nodes(0, 0))
    with pytest.raises(ConfigError) as refused:
        require_room(config, nodes(0))
    assert str(refused.value) == (
        "decode.resources: 2 workers need {CPU: 3} each, and 1 of them find room; free before the "
        "start: {CPU: 4} on n0"
    )
    with pytest.raises(ConfigError, match="no node is there"):
        require_room(config, [])
    spread = load_config(
        None, ["prefill.resources={strategy: STRICT_SPREAD}", "prefill.replicas=2"]
    )
    with pytest.raises(ConfigError, match="prefill.resources: 2 workers .* 1 of them find room"):
        require_room(spread, nodes(0))


def test_a_new_cluster_starts_what_is_configured():
    first = Reconciliation((), ("decode-0", "decode-1", "prefill-0"), ())
    assert reconcile(FIXED, [], is_new=True) == first


def test_a_new_controller_keeps_who_lives_and_starts_who_is_missing():
    done = reconcile(FIXED, ["router", "decode-1", "prefill-0"], is_new=False)
    assert done == Reconciliation(("decode-1", "prefill-0"), ("decode-0",), ())


def test_a_new_controller_stops_who_is_too_many():
    living = ["decode-0", "decode-3", "decode-10", "prefill-0", "prefill-1", "router"]
    done = reconcile(FIXED, living, is_new=False)
    assert done.adopted == ("decode-0", "decode-3", "prefill-0")
    assert done.stopped == ("decode-10", "prefill-1")


def test_pools_that_scale_are_found_at_any_size_within_their_bounds():
    living = ["decode-1", "decode-4", "decode-7", "router"]
    done = reconcile(SCALED, living, is_new=False)
    assert done == Reconciliation(("decode-1", "decode-4", "decode-7"), ("prefill-0",), ())


def test_a_pool_that_the_mode_has_not_is_not_started():
    done = reconcile(sizes_of(load_config(None, ["mode=chunked"])), [], is_new=True)
    assert done.started == ("decode-0",)


def test_names_tell_clusters_apart():
    assert actor_name("a", "decode-0") == "twophase:a:decode-0"
    assert server_of_name("a", "twophase:a:decode-0") == "decode-0"
    assert server_of_name("a", "twophase:ab:decode-0") is None
    for name in ("", "A", "a:b", "-a", "a" * 64):
        with pytest.raises(ConfigError):
            require_cluster_name(name)


def test_servers_listen_where_ray_reaches_their_node():
    config = load_config(None, ["router.port=8100"])
    worker = at_node(DecodeWorkerConfig.from_cluster(config), "10.0.0.7")
    assert worker.listen == "10.0.0.7:0"
    assert at_node(FrontDoorConfig.from_cluster(config), "10.0.0.7").listen == "10.0.0.7:8100"
    everywhere = FrontDoorConfig.from_cluster(load_config(None, ["router.host=0.0.0.0"]))
    assert at_node(everywhere, "10.0.0.7") == everywhere


def test_cards_by_number_are_refused_where_ray_chooses_the_machine():
    config = load_config(None, ["engine.device=cuda", "decode.gpus=[1]", "prefill.gpus=[0]"])
    with pytest.raises(ConfigError, match="prefill.gpus: Ray chooses nodes and cards"):
        require_placeable(config)


def run_one_node(config):
    with ray_cluster(config, tell=print):
        pass


@pytest.mark.parametrize("start", [require_placeable, run_one_node])
def test_other_clocks_are_refused_where_processes_are_those_of_ray(start):
    config = load_config(None, ["chaos.enabled=true", "chaos.clock_skew_s=5"])
    with pytest.raises(ConfigError, match="chaos.clock_skew_s: is 5: only child processes"):
        start(config)


def test_an_address_where_nobody_listens_is_told_at_once():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        for form in (address, f"ray://{address}"):
            with pytest.raises(ConfigError, match=f"no Ray cluster is at {form}: "), joined(form):
                pass
    with (
        pytest.raises(ConfigError, match="auto, HOST:PORT or ray://HOST:PORT is taken"),
        joined("x"),
    ):
        pass


VERSIONS = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.12.1\n"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError(VERSIONS), "runs other versions than this process: Version mismatch: The"),
        (ValueError("no Raylet of this node"), "is no node of the cluster at ray://"),
        (ConnectionError("refused"), "cannot be joined (RAY_AUTH_MODE is not set here): refused"),
    ],
)
def test_what_ray_says_is_told_in_words_of_what_to_change(raised, said, monkeypatch):
    def fail(**options):
        raise raised

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray, "init", fail)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError) as refused, joined(address):
            pass
    assert said in str(refused.value)
