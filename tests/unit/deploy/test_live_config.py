"""What may change in a running cluster does at the next decision; anything else changes nothing."""

import json

import pytest

from core.config import load_config
from core.errors import ConfigError, InvalidRequest, PeerLost
from deploy.live_config import LiveConfig, changes_between
from tests.unit.deploy.test_scaler import BUSY, World

SCALED = ("scaling.prefill={max_replicas: 3}", "scaling.decode.max_replicas=3")


def config(*words):
    return load_config(None, words)


def reload(live, *words, tell=lambda router: None):
    return live.reload(lambda: config(*words), tell)


def test_what_may_change_is_told_with_both_values_and_replaces_the_rest():
    live = LiveConfig(config(*SCALED, "scaling.budget=4"))
    told = []
    result = reload(live, *SCALED, "scaling.budget=6", "router.max_queue_s=9", tell=told.append)
    assert result.sentence == (
        "the configuration changed: router.max_queue_s 60.0 -> 9.0; scaling.budget 4.0 -> 6.0"
    )
    assert live.current.scaling.budget == 6
    assert [router.max_queue_s for router in told] == [9]
    assert reload(live, *SCALED, "scaling.budget=6", "router.max_queue_s=9").changes == ()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("transfer.backend=torch", "transfer.backend auto -> torch"),
        ("engine.dtype=bfloat16", "engine.dtype float32 -> bfloat16"),
        ("prefill.num_threads=2", "prefill.num_threads 1 -> 2"),
        ("router.drain_s=5", "router.drain_s 30.0 -> 5.0"),
        ("security.insecure=true", "(security.insecure)"),
    ],
)
def test_a_key_that_needs_a_restart_is_named_with_both_values_and_nothing_changes(word, told):
    live = LiveConfig(config(*SCALED, "scaling.budget=4"))
    asked = []
    result = reload(
        live, *SCALED, "scaling.budget=6", "router.max_queue_s=9", word, tell=asked.append
    )
    key = word.partition("=")[0]
    assert f"{key}: needs a restart to change" in result.sentence
    assert told in result.sentence
    assert live.current.scaling.budget == 4
    assert asked == []


def test_every_key_that_needs_a_restart_is_told_at_once():
    with pytest.raises(ConfigError, match=r"engine\.nice 10 -> 3; router\.port 8100 -> 1"):
        changes_between(config(), config("router.port=1", "engine.nice=3"))


def test_pools_begin_with_replicas_where_they_scale_and_keep_them_where_they_do_not():
    assert changes_between(config(*SCALED), config(*SCALED, "decode.replicas=2"))
    with pytest.raises(ConfigError, match=r"decode\.replicas: needs a restart"):
        changes_between(config(), config("decode.replicas=2"))
    with pytest.raises(ConfigError, match="scaling: needs a restart to come or to go"):
        changes_between(config(), config(*SCALED))


@pytest.mark.parametrize(
    "error",
    [PeerLost("router", "it is gone"), InvalidRequest("router.max_queue_s", 9, "must be less")],
    ids=["gone", "refused"],
)
def test_what_the_router_does_not_take_changes_nothing(error):
    live = LiveConfig(config(*SCALED, "scaling.budget=4"))

    def refuse(router):
        raise error

    result = reload(live, *SCALED, "scaling.budget=6", "router.max_queue_s=9", tell=refuse)
    assert str(error) in result.refusal
    assert live.current.scaling.budget == 4


def test_a_file_that_cannot_be_read_changes_nothing():
    live = LiveConfig(config(*SCALED))
    before = live.current
    result = reload(live, *SCALED, "scaling.decode.max_replica=3")
    assert "did you mean 'max_replicas'?" in result.refusal
    assert live.current is before


def test_new_bounds_hold_from_the_next_decision_and_are_in_the_log(tmp_path):
    log = tmp_path / "decisions.jsonl"
    world = World("prefill-0", "decode-0", dry_run=True, log=log)
    world.router.demand = BUSY
    assert world.look().pools[0].after == 4
    running = world.live.current
    bounds = running.scaling.prefill.model_copy(update={"max_replicas": 2})
    scaling = running.scaling.model_copy(update={"prefill": bounds, "dry_run": False})
    wanted = running.model_copy(update={"scaling": scaling})
    world.live.reload(lambda: wanted, lambda router: None)
    assert world.look().pools[0].after == 2
    assert world.names == ["prefill-0", "decode-0", "prefill-1"]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert entries[1]["reload"]["scaling.prefill.max_replicas"] == [4, 2]
    assert "scaling.dry_run True -> False" in entries[1]["sentence"]
    assert [bool(entry["actions"]) for entry in entries] == [True, False, True]
