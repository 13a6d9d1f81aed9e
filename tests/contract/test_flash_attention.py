"""flash-attn's kernels, as the engine calls them, against the plain twin; their double everywhere.

The double has the packages' signatures and refusals, so the calls that a card would get run here.
Where a card and a package are, the package itself goes through the same cases.
"""

import inspect
from importlib import import_module

import pytest
import torch

from core.layout import Dtype, KVLayout
from engine.attention import AttentionNeeds, ReferenceAttention, select_attention
from engine.attention.flash2 import Flash2Attention, load_flash2
from engine.attention.flash3 import PACKAGES, Flash3Attention, load_flash3
from engine.attention.flash_double import FlashAttn2Double, FlashAttn3Double
from engine.attention.interface import Unusable
from engine.batch import SequenceStep, build_batch, upload_to_host
from engine.kv_cache import KVCache

SEEDS = range(6)
# One step of bfloat16, at the size of the values.
TOLERANCE = {"rtol": 1.6e-2, "atol": 1e-2}
# As in flash_attn_interface.py of v2.8.3 and hopper/flash_attn_interface.py; cache_seqlens on.
VARLEN_2 = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table"
)
KVCACHE_2 = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
    "num_splits return_softmax_lse"
)
KVCACHE_3 = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
    "v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved "
    "scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
)


def flash2(block_size=256):
    return Flash2Attention(FlashAttn2Double(), block_size=block_size, reason="a test")


def flash3(block_size=16, **how):
    return Flash3Attention(FlashAttn3Double(**how), block_size=block_size, reason="a test")


KERNELS = {
    "2, pages of 256": flash2,
    "2, pages of 512": lambda: flash2(512),
    "3, pages of 16": flash3,
    "3, pages of 1": lambda: flash3(1),
    "3, pages of 176": lambda: flash3(176),
}


def random_case(seed, *, block_size, decode_only, heads=(8, 2), head_dim=64, device="cpu"):
    """q, k, v, one layer's cache and the batch; slots that nobody may read hold NaN."""
    rng = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    steps, blocks = [], torch.randperm(64 if block_size >= 64 else 2000, generator=rng).tolist()
    layout = KVLayout("w", Dtype.BFLOAT16, block_size, 1, num_kv_heads, head_dim)
    cache = KVCache(layout, len(blocks))
    cache.kv_L2NSKD.fill_(float("nan"))
    shared = []
    for b in range(int(torch.randint(1, 7, (1,), generator=rng))):
        start = int(torch.randint(0, 600, (1,), generator=rng))
        num = 1 if decode_only else int(torch.randint(1, 90, (1,), generator=rng))
        num_hit = min(len(shared), start // block_size) if b % 2 else 0  # a prefix of another
        num_blocks = layout.num_blocks(start + num) - num_hit
        table = shared[:num_hit] + [blocks.pop() for _ in range(num_blocks)]
        shared = table[: start // block_size]
        steps.append(SequenceStep([0] * num, start, table, None))
    fresh = []
    for step in steps:
        slots = [
            step.block_table[t // block_size] * block_size + t % block_size for t in range(step.end)
        ]
        kv = torch.randn(2, step.end, num_kv_heads, head_dim, generator=rng).bfloat16()
        places = cache.layer(0).flatten(1, 2)
        known = ~places[0, slots].isnan().any(-1).any(-1)  # what another sequence shares
        kv[:, known] = places[:, slots][:, known]
        places[:, slots] = kv
        fresh.append(kv[:, step.start :])
    k, v = torch.cat(fresh, dim=1).to(device)
    qkv = torch.randn(k.shape[0], num_heads + 2, head_dim, generator=rng).bfloat16().to(device)
    batch = build_batch(
        steps,
        block_size=block_size,
        upload=lambda arrays: [t.to(device) for t in upload_to_host(arrays)],
    )
    # A view with gaps between the rows, as the model makes it.
    return qkv[:, :num_heads], k, v, cache.layer(0).to(device), batch


@pytest.mark.parametrize("decode_only", [False, True], ids=["mixed", "decode"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_of_a_kernel_give_what_the_twin_gives(kernel, seed, decode_only):
    attention = KERNELS[kernel]()
    case = random_case(seed, block_size=attention.block_size, decode_only=decode_only)
    assert case[-1].is_decode == decode_only or case[-1].max_query_tokens == 1
    expected = ReferenceAttention().paged_attention(*case)
    out = attention.paged_attention(*case)
    assert out.dtype == torch.bfloat16
    assert not expected.isnan().any()
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (12, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_head_counts_and_sizes(heads, head_dim):
    for decode_only in (True, False):
        case = random_case(
            3, block_size=256, decode_only=decode_only, heads=heads, head_dim=head_dim
        )
        expected = ReferenceAttention().paged_attention(*case)
        for attention in (flash2(), flash3(256)):
            torch.testing.assert_close(attention.paged_attention(*case), expected, **TOLERANCE)


def test_the_doubles_take_what_the_packages_take():
    def parameters(function):
        return " ".join(inspect.signature(function).parameters)

    double = FlashAttn2Double()
    assert parameters(double.flash_attn_varlen_func) == VARLEN_2
    assert parameters(double.flash_attn_with_kvcache) == KVCACHE_2
    assert parameters(FlashAttn3Double().flash_attn_with_kvcache) == KVCACHE_3


def decode_call(block_size=256, **changes):
    """Arguments of a right decode call of two sequences, and changes to them."""
    kv = torch.zeros(2, 4, block_size, 2, 64, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16),
        "k_cache": kv[0],
        "v_cache": kv[1],
        "cache_seqlens": torch.tensor([3, block_size + 1], dtype=torch.int32),
        "table": torch.tensor([[0, 0], [3, 1]], dtype=torch.int32),
        "causal": True,
    } | changes


REFUSED = {
    "page": (decode_call(128), "divisible by 256"),
    "float32": (
        {k: v.float() if k in ("q", "k_cache", "v_cache") else v for k, v in decode_call().items()},
        "fp16 and bf16",
    ),
    "mixed formats": (decode_call(q=torch.zeros(2, 1, 4, 64).half()), "same dtype"),
    "long table": (decode_call(table=torch.tensor([[0, 0], [3, 1]])), "dtype torch.int32"),
    "long lengths": (decode_call(cache_seqlens=torch.tensor([3, 257])), "int32"),
    "lengths with gaps": (
        decode_call(cache_seqlens=torch.tensor([3, 0, 257, 0], dtype=torch.int32)[::2]),
        "contiguous",
    ),
    "turned table": (
        decode_call(table=torch.tensor([[0, 3], [0, 1]], dtype=torch.int32).T),
        "contiguous last dimension",
    ),
    "turned queries": (
        decode_call(q=torch.zeros(2, 1, 64, 4, dtype=torch.bfloat16).transpose(2, 3)),
        "contiguous last dimension",
    ),
    "turned cache": (
        decode_call(k_cache=torch.zeros(4, 256, 64, 2, dtype=torch.bfloat16).transpose(2, 3)),
        "contiguous last dimension",
    ),
    "head ratio": (decode_call(q=torch.zeros(2, 1, 3, 64, dtype=torch.bfloat16)), "must divide"),
    "head size": (
        decode_call(
            q=torch.zeros(2, 1, 4, 12, dtype=torch.bfloat16),
            k_cache=torch.zeros(4, 256, 2, 12, dtype=torch.bfloat16),
            v_cache=torch.zeros(4, 256, 2, 12, dtype=torch.bfloat16),
        ),
        "multiple of 8",
    ),
    "missing row": (decode_call(table=torch.tensor([[0, 0]], dtype=torch.int32)), "row per seq"),
    "short table": (decode_call(table=torch.tensor([[0], [3]], dtype=torch.int32)), "address"),
    "unknown block": (
        decode_call(table=torch.tensor([[0, 0], [3, 4]], dtype=torch.int32)),
        "outside the cache",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_doubles_refuse_what_the_packages_refuse_or_would_misread(what):
    call, words = REFUSED[what]
    table = call["table"]
    rest = {name: value for name, value in call.items() if name != "table"}
    with pytest.raises(RuntimeError, match=words):
        FlashAttn2Double().flash_attn_with_kvcache(**rest, block_table=table)
    if what == "page":
        FlashAttn3Double().flash_attn_with_kvcache(**rest, page_table=table)
    else:
        with pytest.raises(RuntimeError, match=words):
            FlashAttn3Double().flash_attn_with_kvcache(**rest, page_table=table)


def test_a_maximum_below_the_longest_sequence_is_refused():
    q, _, _, kv, batch = random_case(1, block_size=256, decode_only=False)
    starts = (batch.query_starts_B1, batch.key_starts_B1)
    limits = (batch.max_query_tokens, batch.max_context_tokens)
    varlen, paged = (
        FlashAttn2Double().flash_attn_varlen_func,
        {"block_table": batch.block_tables_BP},
    )
    assert varlen(q, *kv, *starts, *limits, causal=True, **paged).shape == q.shape
    with pytest.raises(RuntimeError, match="max_seqlen_q is less"):
        varlen(q, *kv, *starts, limits[0] - 1, limits[1], causal=True, **paged)
    with pytest.raises(RuntimeError, match="max_seqlen_k is less"):
        varlen(q, *kv, *starts, limits[0], limits[1] - 1, causal=True, **paged)
    with pytest.raises(RuntimeError, match="cover all of q"):
        varlen(q[:-1], *kv, *starts, *limits, causal=True, **paged)


def test_options_that_the_engine_does_not_use_are_refused():
    call = decode_call()
    table = call.pop("table")
    for option in ({"softcap": 30.0}, {"window_size": (128, 0)}, {"k": call["q"]}):
        with pytest.raises(NotImplementedError):
            FlashAttn2Double().flash_attn_with_kvcache(**call, block_table=table, **option)


def test_a_build_without_paged_kv_reads_pages_for_large_prompts_only():
    wheel = FlashAttn3Double(has_paged_kv=False)
    call = decode_call()
    table = call.pop("table")
    with pytest.raises(RuntimeError, match="does not support paged KV"):
        wheel.flash_attn_with_kvcache(**call, page_table=table)
    case = random_case(1, block_size=256, decode_only=False, heads=(16, 1))
    attention = Flash3Attention(wheel, block_size=256, reason="a test")
    expected = ReferenceAttention().paged_attention(*case)
    torch.testing.assert_close(attention.paged_attention(*case), expected, **TOLERANCE)


def needs_on_card(block_size=None):
    device = torch.device("cuda", 0)
    return AttentionNeeds(device, torch.bfloat16, 8, 2, 64, block_size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("load", [load_flash2, load_flash3], ids=["2", "3"])
def test_the_package_itself_gives_what_the_twin_gives(load):
    capability = torch.cuda.get_device_capability(0)
    try:
        attention = load(needs_on_card(), capability, import_module)
    except Unusable as why:
        pytest.skip(f"this kernel cannot be used on this card: {why}")
    for seed in SEEDS:
        for decode_only in (True, False):
            case = random_case(
                seed, block_size=attention.block_size, decode_only=decode_only, device="cuda"
            )
            expected = ReferenceAttention().paged_attention(*case)
            torch.testing.assert_close(attention.paged_attention(*case), expected, **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_gathered_attention_on_a_card_gives_what_the_twin_gives():
    def nothing_is_installed(name):
        raise ModuleNotFoundError(name=name)

    attention = select_attention(
        needs_on_card(16),
        capability=torch.cuda.get_device_capability(0),
        import_kernel=nothing_is_installed,
    )
    assert attention.name == "sdpa"
    for seed in SEEDS:
        for decode_only in (True, False):
            case = random_case(seed, block_size=16, decode_only=decode_only, device="cuda")
            expected = ReferenceAttention().paged_attention(*case)
            torch.testing.assert_close(attention.paged_attention(*case), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("package", "double"),
    [("flash_attn", FlashAttn2Double), *((name, FlashAttn3Double) for name in PACKAGES)],
)
def test_an_installed_package_has_the_signature_of_its_double(package, double):
    try:
        module = import_module(package)
    except ImportError as error:
        pytest.skip(f"{package} is not installed: {error}")
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        if hasattr(double, name):
            theirs = list(inspect.signature(getattr(module, name)).parameters)
            ours = list(inspect.signature(getattr(double(), name)).parameters)
            assert [p for p in theirs if p in ours] == ours
