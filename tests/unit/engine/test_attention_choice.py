"""Which attention is taken, and the reason that the status shows."""

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from core.errors import ConfigError
from engine.attention import AttentionNeeds, CpuAttention, select_attention
from engine.attention.flash_double import FlashAttn2Double, FlashAttn3Double

NEEDS = AttentionNeeds(torch.device("cpu"), torch.bfloat16, 4, 2, 64)
AMPERE, HOPPER, BLACKWELL, TURING = (8, 0), (9, 0), (10, 0), (7, 5)
FLASH_2 = {"flash_attn": FlashAttn2Double()}
FLASH_3 = {"flash_attn_interface": FlashAttn3Double()}
FA3_FWD = {"fa3_fwd_interface": FlashAttn3Double(has_paged_kv=False)}


class Broken:
    """A package that loads and was built for another card."""

    def flash_attn_with_kvcache(self, *arguments, **options):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")


class Wrong:
    """A package that answers with zeros."""

    def flash_attn_with_kvcache(self, q, *arguments, **options):
        return torch.zeros_like(q)


def choose(packages, capability=HOPPER, **needs):
    def import_kernel(name):
        if name not in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if isinstance(packages[name], Exception):
            raise packages[name]
        return packages[name]

    return select_attention(
        replace(NEEDS, **needs), capability=capability, import_kernel=import_kernel
    )


@pytest.mark.parametrize(
    ("packages", "capability", "needs", "name", "words"),
    [
        (FLASH_2 | FLASH_3, HOPPER, {}, "flash-attn 3", ["flash_attn_interface on a Hopper card"]),
        (FLASH_2, HOPPER, {}, "flash-attn 2", ["flash-attn 3", "not installed", "capability 9.0"]),
        (FLASH_2 | FLASH_3, AMPERE, {}, "flash-attn 2", ["flash-attn 3 needs", "9.0", "has 8.0"]),
        (FLASH_2 | FLASH_3, BLACKWELL, {}, "flash-attn 2", ["flash-attn 3 is for Hopper cards"]),
        (FLASH_2 | FA3_FWD, HOPPER, {}, "flash-attn 2", ["does not support paged KV"]),
        (FA3_FWD, HOPPER, {}, "sdpa", ["does not support paged KV", "2 is not installed"]),
        (FLASH_2 | FLASH_3, TURING, {}, "sdpa", ["needs compute capability 8.0", "has 7.5"]),
        (FLASH_2 | FLASH_3, HOPPER, {"dtype": torch.float32}, "sdpa", ["not float32"]),
        (FLASH_2 | FLASH_3, HOPPER, {"head_dim": 12}, "sdpa", ["in steps of 8, not 12"]),
        (FLASH_2 | FLASH_3, HOPPER, {"head_dim": 512}, "sdpa", ["up to 256", "not 512"]),
        ({}, HOPPER, {}, "sdpa", ["gathered KV", "3 (flash_attn_interface) is not installed"]),
        ({"flash_attn_interface": Broken()}, HOPPER, {}, "sdpa", ["failed: CUDA error: no kernel"]),
        ({"flash_attn_interface": Wrong()}, HOPPER, {}, "sdpa", ["gave wrong numbers"]),
        (
            {"flash_attn": ImportError("undefined symbol: _ZN3c10\nmore")},
            HOPPER,
            {},
            "sdpa",
            ["2 cannot be loaded: undefined symbol: _ZN3c10"],
        ),
        (
            {"flash_attn": ModuleNotFoundError("No module named 'einops'", name="einops")},
            HOPPER,
            {},
            "sdpa",
            ["2 cannot be loaded: No module named 'einops'"],
        ),
    ],
)
def test_the_choice_and_its_reason(packages, capability, needs, name, words):
    attention = choose(packages, capability, **needs)
    assert attention.name == name
    assert [word for word in words if word not in attention.reason] == []
    assert "\n" not in attention.reason


@pytest.mark.parametrize(
    ("packages", "configured", "size"),
    [
        (FLASH_2, None, 256),
        (FLASH_2, 512, 512),
        (FLASH_3, None, 64),
        (FLASH_3, 16, 16),
        ({}, None, 16),
        ({}, 48, 48),
    ],
)
def test_the_block_size_follows_the_choice_unless_it_is_configured(packages, configured, size):
    assert choose(packages, block_size=configured).block_size == size
    assert select_attention(replace(NEEDS, block_size=configured)).block_size == configured or 16


def test_a_block_size_that_the_kernel_cannot_read_is_refused_with_the_limit():
    with pytest.raises(ConfigError) as refused:
        choose(FLASH_2, block_size=128)
    assert refused.value.path == "block_size"
    assert "is 128" in refused.value.problem and "multiples of 256" in refused.value.problem
    assert refused.value.suggestion == "256"


def test_without_a_card_it_is_the_compiled_kernel_or_torch():
    chosen = select_attention(NEEDS)
    assert (chosen.name, type(chosen)) == ("numba", CpuAttention)
    odd = select_attention(replace(NEEDS, head_dim=12))
    assert odd.name == "sdpa"
    assert "head size 12 is not a multiple of 8" in odd.reason
    other = select_attention(replace(NEEDS, device=torch.device("meta")))
    assert (other.name, other.reason.split(":")[0]) == ("sdpa", "meta")


def test_gathered_attention_becomes_graphs_of_doubling_widths_within_a_bound():
    attention = choose({}, block_size=16)
    assert attention.graph_widths(1, 100) == (32, 64, 100)
    assert attention.graph_widths(1, 5) == (5,)
    assert attention.graph_widths(64, 100_000) == (32, 64, 128, 256)
    assert attention.graph_widths(1 << 20, 100) == ()


def test_every_server_imports_without_cuda_flash_attn_and_nixl():
    code = (
        "import sys\n"
        "for name in ('flash_attn', 'flash_attn_interface', 'fa3_fwd_interface', 'nixl'):\n"
        "    sys.modules[name] = None\n"  # an import of it raises
        "import deploy.cli, decode_worker.server, prefill_worker.server, router.server\n"
        "import engine.rank, engine.device.cuda, engine.device.double, torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_flash_attn_is_named_in_engine_attention_alone():
    # Imported by name, which import-linter cannot see.
    root = importlib.resources.files("engine")
    users = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if '"flash_attn' in path.read_text(encoding="utf-8")
    ]
    assert users and all(user.startswith("attention/") for user in users)
