"""The seam to a card: packing, refusals, and how much memory the KV cache takes."""

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from core.layout import Dtype, KVLayout
from engine.device import HostDevice, fitting, open_device
from engine.device.double import CardDouble
from engine.device.packing import ALIGNMENT_BYTES, pack, places_of, views_of
from engine.kv_cache import num_cache_blocks

LAYOUT = KVLayout("w", Dtype.BFLOAT16, 16, num_layers=2, num_kv_heads=2, head_dim=8)
BLOCK = LAYOUT.block_bytes


def arrays():
    return [
        np.arange(5, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros(0, dtype=np.int64),
        np.arange(10, dtype=np.int32)[::2],
    ]


def test_packed_arrays_come_out_as_they_went_in():
    offsets, size = places_of(arrays())
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    buffer = torch.full((size,), 255, dtype=torch.uint8)
    pack(arrays(), buffer)
    for array, tensor in zip(arrays(), views_of(arrays(), buffer), strict=True):
        assert tensor.dtype == {8: torch.int64, 4: torch.int32}[array.itemsize]
        assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("has_target", [False, True])
def test_an_upload_may_reuse_memory_and_does_not_alias_the_arrays(has_target):
    given = arrays()
    target = torch.zeros(1024, dtype=torch.uint8) if has_target else None
    tensors = CardDouble().upload(given, target)
    wanted = [array.tolist() for array in given]
    given[0][:] = -1
    assert [tensor.tolist() for tensor in tensors] == wanted
    if target is not None:
        assert tensors[0].data_ptr() == target.data_ptr()


def test_a_cpu_is_always_there_and_has_no_graphs():
    device = open_device("cpu")
    assert isinstance(device, HostDevice)
    assert device.graphs is None and device.free_bytes() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.device: is cuda, and torch .* sees no card"):
        open_device("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_card_beyond_the_last_is_refused():
    with pytest.raises(ConfigError, match=f"this process sees {torch.cuda.device_count()}"):
        open_device("cuda:99")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_uploads_to_a_card_arrive_whatever_follows_them():
    device = open_device("cuda:0")
    with device.computing():
        rounds = [[np.full(4096, i, dtype=np.int64)] for i in range(50)]
        tensors = [device.upload(round_)[0] for round_ in rounds]
        assert [int(t.min()) for t in tensors] == [int(t.max()) for t in tensors] == [*range(50)]


def test_running_out_of_memory_at_the_start_names_what_did_not_fit():
    with (
        pytest.raises(ConfigError, match="kv_cache: the KV cache does not fit .*: CUDA out of"),
        fitting("the KV cache", "kv_cache"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")


@pytest.mark.parametrize(
    ("kv_cache_bytes", "free_bytes", "num_blocks"),
    [
        (None, None, (1 << 30) // BLOCK),
        (10 * BLOCK + 1, None, 10),
        (10 * BLOCK, 11 * BLOCK, 10),
        (None, 1000 * BLOCK, 850),
    ],
)
def test_blocks_from_what_is_configured_or_free(kv_cache_bytes, free_bytes, num_blocks):
    found = num_cache_blocks(LAYOUT, kv_cache_bytes=kv_cache_bytes, free_bytes=free_bytes)
    assert found == num_blocks


def test_all_ranks_share_what_is_configured_and_each_has_its_card():
    layout = KVLayout("w", Dtype.BFLOAT16, 16, 2, 2, 8, tensor_parallel_size=2)
    assert layout.block_bytes == BLOCK
    assert num_cache_blocks(layout, kv_cache_bytes=10 * BLOCK, free_bytes=None) == 10
    assert num_cache_blocks(layout, kv_cache_bytes=None, free_bytes=100 * BLOCK) == 170


def test_more_than_is_free_and_less_than_a_block_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=f"{10 * BLOCK} bytes .* {9 * BLOCK} free bytes"):
        num_cache_blocks(LAYOUT, kv_cache_bytes=10 * BLOCK, free_bytes=9 * BLOCK)
    with pytest.raises(ConfigError, match=f"hold no block: .*{BLOCK} bytes"):
        num_cache_blocks(LAYOUT, kv_cache_bytes=None, free_bytes=BLOCK)
    with pytest.raises(ConfigError, match="hold no block"):
        num_cache_blocks(LAYOUT, kv_cache_bytes=BLOCK, free_bytes=None, num_scratch_blocks=1)
