import pytest
import torch

from core.layout import Dtype, KVLayout
from core.request import SamplingParams
from engine.batch import SequenceStep, build_batch
from engine.kv_cache import KVCache

GREEDY = SamplingParams()
LAYOUT = KVLayout("w", Dtype.BFLOAT16, block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)


def test_a_mixed_batch_is_flattened_in_order():
    batch = build_batch(
        [
            SequenceStep([7, 8, 9], 0, [5], GREEDY),
            SequenceStep([3], 6, [2, 4], GREEDY),
            SequenceStep([1, 2], 3, [9, 0, 1], None),
        ],
        block_size=4,
    )
    assert batch.token_ids_T.tolist() == [7, 8, 9, 3, 1, 2]
    assert batch.positions_T.tolist() == [0, 1, 2, 6, 3, 4]
    assert batch.slot_mapping_T.tolist() == [20, 21, 22, 18, 39, 0]
    assert batch.query_starts_B1.tolist() == [0, 3, 4, 6]
    assert batch.context_lens_B.tolist() == [3, 7, 5]
    assert batch.block_tables_BP.tolist() == [[5, 0], [2, 4], [9, 0]]
    assert batch.sampled_rows.tolist() == [2, 3]
    assert batch.decode_rows.tolist() == [3]
    assert batch.decode_sequences.tolist() == [1]
    spans = [(s.first_row, s.num_rows, s.start, s.end) for s in batch.spans]
    assert spans == [(0, 3, 0, 3), (4, 2, 3, 5)]
    assert (batch.num_tokens, batch.num_sequences) == (6, 3)


def test_the_cache_is_laid_out_as_pages_and_lies_upon_lent_memory():
    storage = torch.zeros(LAYOUT.block_bytes * 5 + 3, dtype=torch.uint8)
    cache = KVCache(LAYOUT, 5, storage)
    assert cache.kv_L2NSKD.shape == (3, 2, 5, 4, 2, 8)
    page = cache.layer(2)[1, 3]
    assert page.is_contiguous()
    page.fill_(1.0)
    offset = ((2 * 2 + 1) * 5 + 3) * LAYOUT.page_bytes
    assert storage[offset : offset + LAYOUT.page_bytes].any()
    storage[offset : offset + LAYOUT.page_bytes] = 0
    assert not storage.any()


@pytest.mark.parametrize(
    "storage",
    [
        torch.zeros(LAYOUT.block_bytes * 2 - 1, dtype=torch.uint8),
        torch.zeros(LAYOUT.block_bytes * 2, dtype=torch.int8),
        torch.zeros(2, LAYOUT.block_bytes, dtype=torch.uint8),
    ],
)
def test_memory_that_does_not_fit_is_refused(storage):
    with pytest.raises(ValueError, match="2 blocks need"):
        KVCache(LAYOUT, 2, storage)
