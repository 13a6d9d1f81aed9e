"""Who holds which rows: every row once, KV heads with the query heads that read them."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.layout import Dtype, KVLayout
from engine.model_config import load_model_config
from engine.shard import shard_of
from engine.weights import load_weights
from tests.tiny_model import write_tiny_model

DIM = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    # 510 is not a multiple of 4: the last rank's logits are padded
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), model_type="qwen2", vocab_size=510)


def shards_of(config, size):
    layout = KVLayout("w", Dtype.FLOAT32, 4, 1, config.num_kv_heads, config.head_dim, size)
    return [shard_of(config, layout, rank) for rank in range(size)]


@st.composite
def divisible_configs(draw):
    size, groups = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_heads = num_kv_heads * groups
    num_heads *= size // math.gcd(num_heads, size)
    ffn, vocab = size * draw(st.integers(1, 5)), draw(st.integers(size * size, 50))
    return size, (num_heads, num_kv_heads, ffn, vocab)


@given(divisible_configs())
def test_every_row_is_held_once_and_query_heads_find_their_kv_head_on_their_rank(directory, drawn):
    size, (num_heads, num_kv_heads, ffn, vocab) = drawn
    config = dataclasses.replace(
        load_model_config(directory),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=DIM,
        intermediate_size=ffn,
        vocab_size=vocab,
    )
    if num_kv_heads % size and size % num_kv_heads:
        with pytest.raises(ConfigError, match=f"{num_heads} query heads and {num_kv_heads} key"):
            shards_of(config, size)
        return
    shards = shards_of(config, size)
    assert [row for s in shards for row in s.q_rows] == list(range(num_heads * DIM))
    assert [row for s in shards for row in s.ffn_rows] == list(range(ffn))
    assert [row for s in shards for row in s.vocab_rows] == list(range(vocab))
    assert {row for s in shards for row in s.kv_rows} == set(range(num_kv_heads * DIM))
    for shard in shards:
        assert shard.config == shards[0].config
        for local in range(shard.config.num_heads):
            whole_head = shard.q_rows.start // DIM + local
            kv_head = shard.kv_rows.start // DIM + local // shard.config.num_groups
            assert kv_head == whole_head // config.num_groups


@pytest.mark.parametrize(("size", "heads"), [(2, (9, 3)), (4, (9, 3)), (4, (12, 3)), (6, (8, 2))])
def test_heads_that_cannot_be_divided_are_refused_with_all_numbers(directory, size, heads):
    config = dataclasses.replace(
        load_model_config(directory), num_heads=heads[0], num_kv_heads=heads[1]
    )
    expected = rf"{heads[0]} query heads and {heads[1]} key/value .* {size} ranks"
    with pytest.raises(ConfigError, match=expected):
        shards_of(config, size)


def test_a_feed_forward_width_that_cannot_be_divided_is_refused(directory):
    config = dataclasses.replace(load_model_config(directory), intermediate_size=129)
    with pytest.raises(ConfigError, match="width of 129 cannot be divided among 2 ranks"):
        shards_of(config, 2)


def test_the_shards_of_the_weights_add_up_to_the_whole_products(directory):
    config = load_model_config(directory)
    (whole,) = (load_weights(directory, s, Dtype.FLOAT32) for s in shards_of(config, 1))
    parts = [load_weights(directory, s, Dtype.FLOAT32) for s in shards_of(config, 4)]
    x_BM = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))

    logits = torch.cat([x_BM @ part.lm_head_VM.T for part in parts], dim=-1)
    torch.testing.assert_close(logits[:, :510], x_BM @ whole.lm_head_VM.T)

    def feed_forward(layer):
        gate, up = (x_BM @ layer.gate_up_OI.T).chunk(2, dim=-1)
        return (gate * up) @ layer.down_OI.T

    torch.testing.assert_close(
        sum(feed_forward(part.layers[1]) for part in parts), feed_forward(whole.layers[1])
    )

    def attend_to_self(layer, num_heads, num_kv):
        qkv = x_BM @ layer.qkv_OI.T + layer.qkv_bias_O
        q, k, v = qkv.view(3, -1, 16).split([num_heads, num_kv, num_kv], dim=1)
        k, v = (z.repeat_interleave(num_heads // num_kv, dim=1) for z in (k, v))
        return (q * k + v).flatten(1) @ layer.output_OI.T

    # 4 query heads and 2 key/value heads: each key/value head lies on two ranks
    torch.testing.assert_close(
        sum(attend_to_self(part.layers[1], 1, 1) for part in parts),
        attend_to_self(whole.layers[1], 4, 2),
    )
