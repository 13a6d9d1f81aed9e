"""Whether a card computes what it should: `check`'s comparisons with a CPU and with float64."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu.model import SharedWeights, write_model
from bench.gpu.setup import Findings, Setup
from core.layout import Dtype
from core.request import SamplingParams
from engine.attention import Attention, AttentionNeeds, ReferenceAttention, SdpaAttention
from engine.attention.flash2 import load_flash2
from engine.attention.flash3 import load_flash3
from engine.attention.interface import Unusable
from engine.batch import SequenceStep, build_batch
from engine.device import Device, HostDevice
from engine.runner import Runner
from engine.weights import LoadWeights, load_weights

GREEDY = SamplingParams()
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 8, 48, 24


def compare_attention(setup: Setup, findings: Findings, device: Device) -> None:
    """Largest error of each attention against float64, for a mixed batch and for decode."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    shape = [int(str(setup.model[name])) for name in names]
    needs = AttentionNeeds(device.torch_device, torch.bfloat16, *shape)
    capability, import_kernel = setup.kernels()
    for name, load in (("flash-attn 3", load_flash3), ("flash-attn 2", load_flash2)):
        try:
            attention: Attention = load(needs, capability, import_kernel)
        except Unusable as why:
            findings.notes.append(f"attention {name}: {why}")
            continue
        _compare(findings, attention, needs, device)
    _compare(findings, SdpaAttention("to be compared"), needs, device)


def _compare(
    findings: Findings, attention: Attention, needs: AttentionNeeds, device: Device
) -> None:
    size, draw = attention.block_size, torch.Generator().manual_seed(0)
    lengths = {"mixed": [(0, 300), (700, 1), (512, 200), (37, 5)], "decode": [(900, 1), (3, 1)] * 4}
    for kind, spans in lengths.items():
        width = -(-1000 // size)
        free = torch.randperm(width * len(spans), generator=draw).tolist()
        steps = [
            SequenceStep([0] * num, start, [free.pop() for _ in range(width)], GREEDY)
            for start, num in spans
        ]
        kv_shape = (2, width * len(spans), size, needs.num_kv_heads, needs.head_dim)
        kv = torch.randn(kv_shape, generator=draw).to(needs.device, needs.dtype)
        batch = build_batch(steps, block_size=size, upload=device.upload)
        q_shape = (batch.num_tokens, needs.num_heads, needs.head_dim)
        q = torch.randn(q_shape, generator=draw).to(needs.device, needs.dtype)
        k, v = kv.flatten(1, 2)[:, batch.slot_mapping_T].unbind(0)
        wide = (q.double(), k.double(), v.double(), kv.double())
        exact = ReferenceAttention(dtype=torch.float64).paged_attention(*wide, batch)
        found = attention.paged_attention(q, k, v, kv, batch)
        error = float((found.double() - exact).abs().max())
        findings.add(f"attention {attention.name}, {kind}: error", error, "of float64")


def compare_random_model(setup: Setup, findings: Findings, device: Device) -> None:
    """Greedy float32 tokens of two layers of the model's shape, on the card and on the CPU."""
    config = dict(setup.model) | {"num_hidden_layers": 2, "vocab_size": setup.parity_vocab}
    load = SharedWeights(device.torch_device)
    draw = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(setup.parity_vocab, (PROMPT_TOKENS + 7 * i,), generator=draw).tolist()
        for i in range(NUM_PROMPTS)
    ]
    with tempfile.TemporaryDirectory(prefix="twophase-gpu-") as directory:
        path = write_model(Path(directory), config)
        wanted = _generate(_runner(path, HostDevice(), load), prompts, [NUM_TOKENS] * NUM_PROMPTS)
        for name, most in (("plain loop", 0), ("graphs", NUM_PROMPTS)):
            found = _generate(
                _runner(path, device, load, most), prompts, [NUM_TOKENS] * NUM_PROMPTS
            )
            _count_equal(findings, f"2 layers, float32, {name}: equal to the CPU", found, wanted)


def compare_checkpoint(
    findings: Findings, device: Device, directory: Path, reference: Path, num_rows: int
) -> None:
    """Greedy float32 tokens of a checkpoint, on the card and in a file of reference tokens."""
    rows = [json.loads(line) for line in reference.read_text(encoding="utf-8").splitlines()]
    rows = sorted(rows, key=lambda row: len(row["prompt_token_ids"]))[:num_rows]
    prompts = [row["prompt_token_ids"] for row in rows]
    wanted = [row["output_token_ids"] for row in rows]
    runner = _runner(directory, device, load_weights, len(rows), kv_cache_bytes=1 << 30)
    found = _generate(runner, prompts, [len(tokens) for tokens in wanted])
    _count_equal(findings, "checkpoint, float32: equal to the reference", found, wanted)


def _runner(
    directory: Path,
    device: Device,
    load: LoadWeights,
    max_decode_sequences: int = 0,
    *,
    kv_cache_bytes: int = 64 << 20,
) -> Runner:
    runner = Runner(
        directory,
        dtype=Dtype.FLOAT32,
        num_threads=torch.get_num_threads(),
        kv_cache_bytes=kv_cache_bytes,
        max_context_tokens=1024,
        max_decode_sequences=max_decode_sequences,
        device=device,
        load=load,
    )
    runner.warm_up()
    return runner


def _generate(
    runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
) -> list[list[int]]:
    """Greedy answers of all prompts, each in blocks of its own, decoded together."""
    outputs: list[list[int]] = [[] for _ in prompts]
    tables, first = [], 0
    for prompt, num in zip(prompts, num_tokens, strict=True):
        stop = first + runner.layout.num_blocks(len(prompt) + num)
        tables.append(range(first, stop))
        first = stop
    for prompt, table, output in zip(prompts, tables, outputs, strict=True):
        step = SequenceStep(prompt, 0, table, GREEDY)
        output += _drawn(runner.step([step]).token_ids)
    while running := [b for b, output in enumerate(outputs) if len(output) < num_tokens[b]]:
        steps = [
            SequenceStep([outputs[b][-1]], len(prompts[b]) + len(outputs[b]) - 1, tables[b], GREEDY)
            for b in running
        ]
        for b, token_id in zip(running, _drawn(runner.step(steps).token_ids), strict=True):
            outputs[b].append(token_id)
    return outputs


def _drawn(token_ids: Sequence[int | None]) -> list[int]:
    return [token_id for token_id in token_ids if token_id is not None]


def _count_equal(
    findings: Findings, name: str, found: list[list[int]], wanted: list[list[int]]
) -> None:
    num_equal = sum(f == w for f, w in zip(found, wanted, strict=True))
    findings.add(name, num_equal, "answers", "answers", len(wanted))
    if num_equal < len(wanted):
        findings.notes.append(f"{name}: {len(wanted) - num_equal} of {len(wanted)} differ")
