"""The examples for cards: each worker has cards of its own, and settings that the engine takes."""

from pathlib import Path

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.layout import Dtype
from deploy.plan import ClusterPlan
from engine.leader import EngineSettings

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("gpu-*.yaml"))
TWO_HOSTS = "gpu-two-hosts.yaml"


def settings_of(worker):
    return EngineSettings.of(
        Path("model"), worker.engine, worker.pool, cores=worker.cores, gpus=worker.gpus
    )


def devices_of(worker):
    settings = settings_of(worker)
    return [settings.device_of(rank) for rank in range(settings.tensor_parallel)]


def test_there_are_examples_of_every_kind():
    names = {path.name for path in EXAMPLES}
    assert names == {
        "gpu-2p6d.yaml", "gpu-4p4d.yaml", "gpu-tensor-parallel.yaml", TWO_HOSTS,
    }  # fmt: skip


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_every_rank_has_a_card_of_its_own(path: Path):
    plan = ClusterPlan.of(load_config(path))
    pools = [list(plan.prefill), list(plan.decode)]
    hosts = pools if path.name == TWO_HOSTS else [pools[0] + pools[1]]
    for workers in hosts:
        cards = [card for worker in workers for card in devices_of(worker)]
        num_cards = 4 if path.name == TWO_HOSTS else 8
        assert sorted(cards) == [f"cuda:{i}" for i in range(num_cards)]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_cache_and_block_size_are_left_to_the_card_and_decode_has_graphs(path: Path):
    plan = ClusterPlan.of(load_config(path))
    for worker in (*plan.prefill, *plan.decode):
        settings = settings_of(worker)
        assert settings.kv_cache_bytes is None and settings.block_size is None
        assert settings.dtype is Dtype.BFLOAT16
    assert all(settings_of(w).max_decode_sequences == 0 for w in plan.prefill)
    assert all(settings_of(w).max_decode_sequences >= 64 for w in plan.decode)


def test_ranks_are_told_their_cards_or_take_them_in_order():
    chosen = EngineSettings(
        Path("m"), Dtype.BFLOAT16, 1, tensor_parallel=2, device="cuda", gpus=(5, 3)
    )
    assert [chosen.of_rank(rank, 0).device for rank in (0, 1)] == ["cuda:5", "cuda:3"]
    plain = EngineSettings(Path("m"), Dtype.BFLOAT16, 1, tensor_parallel=2, device="cuda")
    assert [plain.of_rank(rank, 0).device for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert EngineSettings(Path("m"), Dtype.FLOAT32, 1).of_rank(0, 0).device == "cpu"


def test_graphs_can_be_left_out():
    config = load_config(None, ["engine.device=cuda", "decode.cuda_graphs=false"])
    assert settings_of(ClusterPlan.of(config).decode[0]).max_decode_sequences == 0


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["decode.gpus=[0]"], "decode.gpus", "has no effect with engine.device cpu"),
        (["prefill.gpus=[0]"], "prefill.gpus", "has no effect with engine.device cpu"),
        (["engine.device=cuda", "decode.gpus=[0, 1]"], "decode", "1 replicas of 1 ranks take 1"),
        (
            ["engine.device=cuda", "decode.tensor_parallel=2"],
            "decode.tensor_parallel",
            "cannot be handed over",
        ),
        (
            ["engine.device=cuda", "prefill.tensor_parallel=2"],
            "prefill.tensor_parallel",
            "cannot be handed over",
        ),
        (["transfer.backend=ipc"], "transfer.backend", "ipc joins no workers on cpu"),
        (
            ["engine.device=cuda", "transfer.backend=shm"],
            "transfer.backend",
            "shm joins no workers on cuda",
        ),
        (["engine.device=rocm"], "engine.device", "got 'rocm'"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(overrides, path, words):
    with pytest.raises(ConfigError) as refused:
        load_config(None, overrides)
    assert refused.value.path == path
    assert words in refused.value.problem
