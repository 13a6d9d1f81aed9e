"""Compiled kernels against their plain twins: same numbers, also in the cache."""

import numba
import numpy as np
import pytest
import torch

from core.layout import Dtype, KVLayout
from core.request import SamplingParams
from engine.attention import CpuAttention, ReferenceAttention, SdpaAttention
from engine.attention.decode_kernel import tile_of
from engine.batch import SequenceStep, build_batch
from engine.kernels import exp
from engine.kv_cache import TORCH_DTYPES, KVCache
from engine.linear import Linear
from engine.ops import NumbaOps, TorchOps, select_ops

GREEDY = SamplingParams()
DTYPES = [Dtype.FLOAT32, Dtype.BFLOAT16]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return TORCH_DTYPES[request.param]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_add_rms_norm_equals_its_twin(dtype):
    delta, weight = torch.randn(5, 72).to(dtype), torch.randn(72)
    residuals = [torch.randn(5, 72)] * 2
    residuals = [r.clone() for r in residuals]
    outs = [
        ops.add_rms_norm(delta, residual, weight, 1e-5)
        for ops, residual in zip((NumbaOps(), TorchOps()), residuals, strict=True)
    ]
    assert outs[0].dtype == dtype
    torch.testing.assert_close(outs[0], outs[1], **TOLERANCE[dtype])
    torch.testing.assert_close(residuals[0], residuals[1], rtol=0, atol=0)


def test_head_rms_norm_equals_its_twin_on_a_part_of_the_heads(dtype):
    weight = torch.randn(16)
    qkv = [torch.randn(5, 6, 16).to(dtype)] * 2
    qkv = [x.clone() for x in qkv]
    for ops, x in zip((NumbaOps(), TorchOps()), qkv, strict=True):
        ops.head_rms_norm(x[:, 2:4], weight, 1e-6)
    torch.testing.assert_close(qkv[0], qkv[1], **TOLERANCE[dtype])


def test_silu_mul_equals_its_twin_for_small_and_large_values(dtype):
    gate_up = torch.cat([torch.linspace(-120, 120, 97), torch.randn(97)]).expand(3, 194)
    gate_up = gate_up.to(dtype).contiguous()
    out = NumbaOps().silu_mul(gate_up)
    torch.testing.assert_close(out, TorchOps().silu_mul(gate_up), **TOLERANCE[dtype])


@pytest.mark.parametrize("layout_dtype", DTYPES)
def test_rotation_and_cache_writes_equal_their_twin(layout_dtype):
    layout = KVLayout("w", layout_dtype, 4, num_layers=1, num_kv_heads=2, head_dim=16)
    steps = [SequenceStep([1, 2, 3], 2, [3, 1], None), SequenceStep([1], 5, [0, 4], None)]
    batch = build_batch(steps, block_size=4)
    angles = torch.randn(8, 2, 8)
    first = torch.randn(4, 8, 16).to(TORCH_DTYPES[layout_dtype])
    results = []
    for ops in (NumbaOps(), TorchOps()):
        qkv, cache = first.clone(), KVCache(layout, 5)
        ops.rotate_and_write(qkv, angles, batch, cache.layer(0))
        results.append((qkv, cache.kv_L2NSKD))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, **TOLERANCE[fast.dtype])
    qkv, kv = results[0]
    assert torch.equal(kv[0, 0, 3, 2], qkv[0, 4:6])
    assert torch.equal(kv[0, 1, 4, 1], qkv[3, 6:8])
    assert kv.count_nonzero() == 2 * 4 * 2 * 16


def test_bfloat16_rounds_to_nearest_even_like_torch():
    x = torch.cat([torch.randn(1000), torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1e30, 1e-40])])
    zeros, ones = torch.zeros(1, x.numel()), torch.ones(x.numel())
    out = NumbaOps().add_rms_norm(x[None].bfloat16(), zeros, ones, 1.0)
    assert out.dtype == torch.bfloat16
    twin = TorchOps().add_rms_norm(x[None].bfloat16(), torch.zeros_like(zeros), ones, 1.0)
    assert (out == twin).float().mean() > 0.99


def test_exp_is_exact_to_a_few_units_over_its_whole_range():
    @numba.njit(fastmath=True)
    def exps(x, out):
        for i in range(x.size):
            out[i] = exp(x[i])

    x = np.linspace(-86, 87, 20001, dtype=np.float32)
    out = np.empty_like(x)
    exps(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=2e-5)
    small = np.abs(x) < 10
    np.testing.assert_allclose(out[small], np.exp(x[small].astype(np.float64)), rtol=1e-6)


def attention_case(dtype, *, num_heads, num_kv_heads, head_dim, block_size):
    """A batch of every kind of sequence over a cache whose unused slots hold NaN."""
    lengths = [(0, 5), (7, 1), (0, 1), (9, 4), (33, 1), (3, 9), (16, 16), (15, 1)]
    layout = KVLayout("w", dtype, block_size, 1, num_kv_heads, head_dim)
    num_blocks = sum(layout.num_blocks(start + num) for start, num in lengths)
    cache = KVCache(layout, num_blocks)
    cache.kv_L2NSKD.fill_(float("nan"))
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    steps, fresh = [], []
    for start, num in lengths:
        table = [free.pop() for _ in range(layout.num_blocks(start + num))]
        steps.append(SequenceStep([0] * num, start, table, GREEDY))
        kv = torch.randn(2, start + num, num_kv_heads, head_dim).to(TORCH_DTYPES[dtype])
        slots = [table[t // block_size] * block_size + t % block_size for t in range(start + num)]
        cache.layer(0).flatten(1, 2)[:, slots] = kv
        fresh.append(kv[:, start:])
    k, v = torch.cat(fresh, dim=1)
    q = torch.randn(k.shape[0], num_heads, head_dim).to(TORCH_DTYPES[dtype])
    return q, k, v, cache.layer(0), build_batch(steps, block_size=block_size)


@pytest.mark.parametrize("dtype_", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (4, 2, 16), (2, 2, 24), (7, 1, 8), (10, 1, 128)],
)
@pytest.mark.parametrize("block_size", [16, 4, 1, 6])
@pytest.mark.parametrize("kind", ["numba", "sdpa"])
def test_attention_equals_the_reference(
    kind, block_size, num_heads, num_kv_heads, head_dim, dtype_
):
    case = attention_case(
        dtype_,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    fast = CpuAttention(head_dim) if kind == "numba" else SdpaAttention("test")
    out = fast.paged_attention(*case)
    expected = ReferenceAttention().paged_attention(*case)
    torch.testing.assert_close(out, expected, **TOLERANCE[out.dtype])


@pytest.mark.parametrize(
    ("num_groups", "head_dim", "num_heads"),
    [(1, 64, 1), (3, 64, 3), (7, 64, 7), (8, 128, 4), (10, 128, 2), (11, 128, 1), (2, 1024, 1)],
)
def test_heads_of_a_tile_divide_their_group_and_fit_registers(num_groups, head_dim, num_heads):
    heads, lanes = tile_of(num_groups, head_dim)
    assert (len(heads), len(lanes)) == (num_heads, head_dim // 8)


def test_fused_operations_are_for_a_cpu():
    assert isinstance(select_ops(torch.device("cpu")), NumbaOps)
    assert isinstance(select_ops(torch.device("meta")), TorchOps)


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_products_equal_plain_ones(dtype, num_rows, has_bias):
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(num_rows, 32).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    with torch.inference_mode():
        linear = Linear(weight, bias)
        out = linear(x)
    assert linear.is_packed
    plain = torch.nn.functional.linear(x, weight, bias)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out, plain, rtol=tolerance, atol=tolerance)


def test_products_work_where_packing_is_missing(monkeypatch):
    monkeypatch.setattr("engine.linear._pack", lambda weight: None)
    weight, x = torch.randn(48, 32), torch.randn(3, 32)
    linear = Linear(weight)
    assert not linear.is_packed
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))
