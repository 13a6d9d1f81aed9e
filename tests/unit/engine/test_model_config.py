import json

import pytest

from core.errors import ModelError
from engine.model_config import RopeScaling, load_model_config
from tests.tiny_model import tiny_config, write_tiny_model


def write_config(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_is_read(tmp_path, model_type):
    config = load_model_config(write_tiny_model(tmp_path, model_type=model_type))
    assert (config.family, config.num_layers, config.num_groups) == (model_type, 4, 2)
    assert config.has_attention_bias == (model_type == "qwen2")
    assert config.has_qk_norm == (model_type == "qwen3")
    assert config.eos_token_ids == (2,)


def test_old_and_new_spelling_of_the_rotary_settings_mean_the_same(tmp_path):
    new = tiny_config() | {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    }
    old = tiny_config() | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del old["rope_parameters"], old["dtype"]
    old["torch_dtype"] = "float32"
    configs = []
    for name, fields in (("new", new), ("old", old)):
        (tmp_path / name).mkdir()
        configs.append(load_model_config(write_config(tmp_path / name, fields)))
    assert configs[0] == configs[1]
    assert configs[0].rope_theta == 5e5
    assert configs[0].rope_scaling == RopeScaling("linear", 2.0)


def test_defaults_follow_hugging_face(tmp_path):
    fields = tiny_config()
    del fields["head_dim"], fields["num_key_value_heads"], fields["rope_parameters"]
    config = load_model_config(write_config(tmp_path, fields))
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 4, 10000.0)
    assert config.rope_scaling is None


def test_end_of_sequence_ids_prefer_the_generation_settings(tmp_path):
    write_config(tmp_path, tiny_config() | {"eos_token_id": 5})
    assert load_model_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_model_config(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window"),
        (
            {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True},
            "sliding_window",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_file_and_field(tmp_path, changes, field):
    write_config(tmp_path, tiny_config() | changes)
    with pytest.raises(ModelError) as caught:
        load_model_config(tmp_path)
    assert f"config.json: {field}: " in str(caught.value)


def test_a_sliding_window_that_is_off_or_never_reached_is_no_obstacle(tmp_path):
    off = {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}
    wide = {"model_type": "mistral", "sliding_window": 4096}
    for changes in (off, wide):
        load_model_config(write_config(tmp_path, tiny_config() | changes))


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_missing_or_broken_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)
