"""The scaling section: what is refused, by which key, and on which line."""

import pytest

from core.config import ClusterConfig, load_config, problems_of
from core.errors import ConfigError
from core.settings.file import line_of
from core.settings.scaling import DecodeScaling, PoolScaling, ScalingConfig

SPLIT = "scaling.prefill={max_replicas: 4}"


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_replicas_are_where_pools_begin():
    config = load_config(None, [SPLIT, "prefill.replicas=2", "scaling.budget=4"])
    assert config.scaling.prefill.max_replicas == 4
    assert load_config().scaling is None


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["scaling={}"], "scaling.prefill: is missing: there is a prefill pool"),
        (["mode=chunked", SPLIT], "scaling.prefill: has no effect where decode workers read"),
        ([SPLIT, "decode.replicas=9"], "decode.replicas: is 9, and scaling.decode allows 1 to 4"),
        ([SPLIT, "prefill.replicas=5"], "prefill.replicas: is 5, and scaling.prefill allows 1 to"),
        ([SPLIT, "scaling.max_ratio=1", "prefill.replicas=2"], "outside scaling's ratio"),
        ([SPLIT, "scaling.budget=2", "decode.replicas=2"], "scaling.budget: is 2, and `replicas`"),
        ([SPLIT, "decode.cores=[0]"], "decode.cores: says nothing of workers that scaling adds"),
        ([SPLIT, "scaling.grow_after_s=400"], "shrink_after_s is 300, less than grow_after_s"),
        ([SPLIT, "scaling.shrink_after_s=8", "scaling.grow_after_s=0"], "one look would decide"),
        ([SPLIT, "scaling.budget=1"], "budget is 1, and the fewest workers cost 2"),
        ([SPLIT, "scaling.min_ratio=5"], "no numbers of workers within the bounds"),
        ([SPLIT, "scaling.decode.min_replicas=0"], "min_replicas is 0 for one pool"),
        ([SPLIT, "scaling.decode.max_replicas=0"], "max_replicas is 0, less than 1"),
        ([SPLIT, "scaling.decode.max_replica=3"], "did you mean 'max_replicas'?"),
        (["mode=chunked", "scaling.min_ratio=1"], "min_ratio has no effect without a prefill"),
    ],
)
def test_a_section_that_cannot_be_kept_is_refused(overrides, text):
    assert text in refusal(*overrides)


def test_a_budget_holds_as_many_as_it_says():
    scaling = ScalingConfig(
        prefill=PoolScaling(cost=2.0), decode=DecodeScaling(cost=1.0), max_ratio=2.0
    )
    assert scaling.cost(2, 3) == 7.0
    assert list(scaling.prefill_range(1)) == [1, 2]
    assert list(scaling.prefill_range(0)) == []


def test_all_problems_of_a_file_are_found_and_have_lines(tmp_path):
    path = tmp_path / "cluster.yaml"
    text = "model: x\nscaling:\n  prefill:\n    max_replica: 4\n  budget: -1\nrooter: {}\n"
    path.write_text(text)
    found = {problem.path: problem for problem in problems_of(path)}
    assert {key: line_of(text, key) for key in found} == {
        "scaling.prefill.max_replica": 4,
        "scaling.budget": 5,
        "rooter": 6,
    }
    assert found["rooter"].suggestion == "router"
    assert found["scaling.prefill.max_replica"].suggestion == "max_replicas"


def test_a_key_that_is_not_there_has_the_line_of_its_parent():
    text = "decode:\n  cores: [1,\n    2]\n"
    assert line_of(text, "decode.replicas") == 1
    assert line_of(text, "decode.cores.1") == 3
    assert line_of(text, "prefill.replicas") is None


def test_the_schema_names_every_key_with_its_sentence():
    schema = ClusterConfig.model_json_schema()
    assert {"scaling", "prefill", "decode"} <= set(schema["properties"])
    assert "description" in schema["$defs"]["ScalingConfig"]["properties"]["budget"]
