"""Which servers a configuration asks for."""

from core.config import Mode, load_config
from deploy.plan import ClusterPlan


def test_a_disaggregated_cluster_has_two_pools_with_their_cores():
    config = load_config(
        None, ["prefill.replicas=2", "prefill.cores=[0,1]", "decode.replicas=3", "router.port=9"]
    )

    plan = ClusterPlan.of(config)

    assert [(worker.name, worker.cores) for worker in plan.prefill] == [
        ("prefill-0", (0,)),
        ("prefill-1", (1,)),
    ]
    assert [worker.name for worker in plan.decode] == ["decode-0", "decode-1", "decode-2"]
    assert plan.router.listen == "127.0.0.1:9"


def test_a_colocated_cluster_has_no_prefill_pool():
    plan = ClusterPlan.of(load_config(None, ["mode=colocated"]))

    assert plan.prefill == ()
    assert plan.decode[0].mode is Mode.COLOCATED


def test_the_router_is_told_of_started_workers_beside_those_of_the_file():
    plan = ClusterPlan.of(load_config(None, ["router.workers=[a:1]"]))

    assert plan.router_with(["b:2", "c:3"]).router.workers == ("a:1", "b:2", "c:3")
