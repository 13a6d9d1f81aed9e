"""Moves on a cache give the bytes of plan order, whatever the block ids and the device code."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from core.link import Span
from kv_transfer import pages
from kv_transfer.cuda.device_pages import DevicePages, checksum_factors, tensor_checksum
from kv_transfer.pages import HostPages
from kv_transfer.streaming import LINE_BYTES, stream_pages

NUM_LAYERS, NUM_BLOCKS = 3, 12


def random_cache(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, 2, NUM_BLOCKS, 4, 2, 8)
    return torch.randn(shape, generator=generator).to(dtype)


def plan_order_bytes_reference(cache, span, block_ids):
    """One page at a time, in the order of the definition."""
    return b"".join(
        cache[layer, k_or_v, block_id].contiguous().view(torch.uint8).numpy().tobytes()
        for layer in span.layers
        for k_or_v in range(2)
        for block_id in block_ids
    )


spans_and_ids = st.builds(
    lambda first_layer, num_layers, ids: (
        Span(first_layer, min(num_layers, NUM_LAYERS - first_layer), 0, len(ids)),
        ids,
    ),
    st.integers(0, NUM_LAYERS - 1),
    st.integers(1, NUM_LAYERS),
    st.one_of(
        st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True),
        st.integers(1, NUM_BLOCKS).map(lambda n: list(range(NUM_BLOCKS - n, NUM_BLOCKS))),
    ),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(params=["whole", "page by page", "streamed", "streamed page by page"])
def way(request, monkeypatch):
    """Each way to copy: what is cut off at a size in the product happens to small pages here."""
    if "page by page" in request.param:
        monkeypatch.setattr(pages, "CHUNK_BYTES", 1)
    if "streamed" in request.param:
        monkeypatch.setattr(pages, "MIN_STREAMED_BYTES", 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_ids", [[3, 4, 5], [9, 0, 4], [11]])
def test_gather_scatter_and_copy_agree_with_the_reference(dtype, block_ids):
    source, target = random_cache(dtype), torch.zeros_like(random_cache(dtype))
    span = Span(1, 2, 0, len(block_ids))
    expected = plan_order_bytes_reference(source, span, block_ids)
    checksum = xxhash.xxh3_64_intdigest(expected)
    staging = torch.empty(len(expected), dtype=torch.uint8)
    target_ids = [7, 2, 8][: len(block_ids)]

    assert HostPages(source).gather(span, block_ids, staging) == checksum
    assert staging.numpy().tobytes() == expected
    assert HostPages(target).scatter(span, target_ids, staging) == checksum
    assert plan_order_bytes_reference(target, span, target_ids) == expected
    assert HostPages(target).checksum(span, target_ids) == checksum

    copied = torch.zeros_like(target)
    assert HostPages(source).copy_to(HostPages(copied), span, block_ids, target_ids) == checksum
    assert torch.equal(copied.view(torch.uint8), target.view(torch.uint8))
    assert not copied[0].any()


@pytest.mark.parametrize("first", [0, 1, 16])
def test_a_cache_that_lies_across_cache_lines_is_copied_as_well(first, monkeypatch):
    monkeypatch.setattr(pages, "MIN_STREAMED_BYTES", 1)
    source = random_cache(torch.float32)
    storage = torch.zeros(source.numel() + 32)
    target = storage[first : first + source.numel()].view(source.shape)
    span = Span(0, NUM_LAYERS, 0, NUM_BLOCKS)
    HostPages(source).copy_to(HostPages(target), span, range(NUM_BLOCKS), range(NUM_BLOCKS))
    assert torch.equal(target, source)
    assert storage.count_nonzero() == source.count_nonzero()


@pytest.mark.parametrize("block_ids", [[0, NUM_BLOCKS], [-1, 0], [3, -2, 5]])
def test_a_block_that_the_cache_does_not_have_is_an_error_and_nothing_is_written(block_ids):
    source, target = random_cache(torch.float32), torch.zeros_like(random_cache(torch.float32))
    span = Span(NUM_LAYERS - 1, 1, 0, len(block_ids))
    ids = range(len(block_ids))
    with pytest.raises(IndexError):
        HostPages(source).copy_to(HostPages(target), span, ids, block_ids)
    with pytest.raises(IndexError):
        HostPages(source).checksum(span, block_ids)
    assert not target.any()


@given(
    page_ids=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True),
    num_lines=st.integers(1, 5),
    start=st.integers(0, 70),
)
def test_streamed_pages_come_from_any_place_and_change_nothing_else(page_ids, num_lines, start):
    page_bytes = num_lines * LINE_BYTES
    numbers = np.random.default_rng(0)
    source = numbers.integers(1, 255, start + len(page_ids) * page_bytes, dtype=np.uint8)
    target = torch.zeros(12 * page_bytes, dtype=torch.uint8).numpy()
    expected = target.copy().reshape(12, page_bytes)
    expected[1:][page_ids] = source[start:].reshape(len(page_ids), page_bytes)
    stream_pages(target, page_bytes, np.array(page_ids), page_bytes, source, start)
    assert np.array_equal(target, expected.reshape(-1))


@settings(deadline=None)
@given(case=spans_and_ids, dtype=dtypes)
def test_host_and_device_pages_stage_the_same_bytes(case, dtype):
    span, block_ids = case
    source = random_cache(dtype)
    expected = plan_order_bytes_reference(source, span, block_ids)
    staged = [torch.empty(len(expected), dtype=torch.uint8) for _ in range(2)]
    HostPages(source).gather(span, block_ids, staged[0])
    sent = DevicePages(source).gather(span, block_ids, staged[1])
    assert DevicePages(source).checksum(span, block_ids) == sent
    assert staged[0].numpy().tobytes() == staged[1].numpy().tobytes() == expected

    targets = [torch.zeros_like(source) for _ in range(2)]
    HostPages(targets[0]).scatter(span, block_ids, staged[0])
    assert DevicePages(targets[1]).scatter(span, block_ids, staged[1]) == sent
    assert torch.equal(targets[0], targets[1])


@given(data=st.binary(min_size=16, max_size=64), position=st.integers(0), bit=st.integers(0, 7))
def test_the_device_checksum_sees_every_flipped_bit(data, position, bit):
    words = torch.from_numpy(np.frombuffer(data[: len(data) // 8 * 8], dtype=np.uint8).copy())
    flipped = words.clone()
    flipped[position % len(words)] ^= 1 << bit
    factors = checksum_factors(len(words) // 8, words.device)
    assert tensor_checksum(words, factors) != tensor_checksum(flipped, factors)


def test_the_device_checksum_sees_swapped_pages():
    first, second = torch.full((64,), 1, dtype=torch.uint8), torch.full((64,), 2, dtype=torch.uint8)
    factors = checksum_factors(16, first.device)
    assert tensor_checksum(torch.cat((first, second)), factors) != tensor_checksum(
        torch.cat((second, first)), factors
    )


def test_the_device_code_copies_from_cache_to_cache_and_hashes_alike_whatever_it_hashed_before():
    source, span = random_cache(torch.bfloat16), Span(1, 2, 0, 3)
    target, pages_ = torch.zeros_like(source), DevicePages(source)
    sums = [pages_.checksum(Span(0, 3, 0, n), [*range(n)]) for n in (1, 7, 2)]
    assert sums == [DevicePages(source).checksum(Span(0, 3, 0, n), [*range(n)]) for n in (1, 7, 2)]
    sent = pages_.copy_to(DevicePages(target), span, [3, 9, 4], [1, 0, 7])
    assert sent == DevicePages(target).checksum(span, [1, 0, 7])
    assert torch.equal(target[1:, :, [1, 0, 7]], source[1:, :, [3, 9, 4]])
    assert not target[0].any() and not target[:, :, [2, 3, 4, 5, 6, 8, 9, 10, 11]].any()


@pytest.mark.parametrize("block_ids", [[-1, 0], [3, NUM_BLOCKS]])
def test_the_device_code_refuses_blocks_that_the_cache_does_not_have(block_ids):
    with pytest.raises(IndexError, match=f"of {NUM_BLOCKS}"):
        DevicePages(random_cache(torch.float32)).checksum(Span(0, 1, 0, 2), block_ids)
