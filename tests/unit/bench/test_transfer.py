"""The report of bench.transfer says what was measured, beside the right peer."""

import pytest

from bench import transfer
from bench.transfer_exposed import Exposure
from bench.transfer_pair import CacheSize, Case, Links, Pair
from core.layout import Dtype, KVLayout
from kv_transfer.shm import ShmBackend
from kv_transfer.torch_backend import TorchBackend

LAYOUT = KVLayout("bench", Dtype.FLOAT32, 16, 4, 1, 64)
SECONDS = {"memcpy": 0.5, "gloo": 1.0, "shm": 1.0, "torch": 2.0, "checksum": 0.1}


def by_name(rows, unit=None):
    return {row.name: row for row in rows if unit in (None, row.unit)}


def test_every_backend_stands_beside_memcpy_and_torch_beside_gloo_too():
    case = Case("a", LAYOUT, num_blocks=8)
    rows = transfer.speed_rows(case, SECONDS)
    assert [(row.name, row.peer, row.ratio) for row in rows] == [
        ("a, shm", "memcpy", 0.5),
        ("a, torch", "gloo", 0.5),
        ("a, torch", "memcpy", 0.25),
    ]
    assert rows[0].value == pytest.approx(case.num_bytes / 1e9)
    # 1 nixl has a row exactly if it was measured
    assert "a, nixl" in by_name(transfer.speed_rows(case, SECONDS | {"nixl": 1.0}))


def test_checksums_count_at_both_ends_and_exposed_transfer_against_its_backends_limit():
    exposures = [Exposure("shm", 512, prefill_s=1.0, exposed_s=0.005, ttft_s=1.25)]
    (row,) = transfer.checksum_rows({"512 tokens": 0.005}, exposures)
    assert (row.value, row.peer_value, row.ratio) == pytest.approx((1.0, 2.0, 0.5))
    row = by_name(transfer.exposed_rows(exposures), "% of TTFT")["512 tokens, shm: exposed"]
    assert (row.value, row.ratio) == pytest.approx((0.4, 0.4))
    (torch_row,) = by_name(
        transfer.exposed_rows([Exposure("torch", 512, 1.0, 0.005, 1.25)]), "% of TTFT"
    ).values()
    assert torch_row.ratio == pytest.approx(0.2)


def test_the_cases_cover_the_sizes_and_prompts_that_are_promised():
    sizes = {case.name: case.num_bytes for case in transfer.cases()}
    assert (sizes["64 KiB"], sizes["64 MiB"]) == (64 << 10, 64 << 20)
    assert {f"{num} tokens" for num in (128, 512, 2048, 8000)} < set(sizes)
    assert sizes["512 tokens"] == 512 * 46_080


def test_two_processes_move_every_case_by_every_way():
    cases = [Case("runs", LAYOUT, 40), Case("scattered", LAYOUT, 40, is_scattered=True)]
    backends = [ShmBackend(), TorchBackend(host="127.0.0.1")]
    with Pair() as pair, Links(pair, CacheSize(LAYOUT, 40), backends) as links:
        for seconds in map(links.measure, cases):
            assert set(seconds) == {"memcpy", "gloo", "checksum", "shm", "torch"}
            assert all(0 < value < 5 for value in seconds.values())
