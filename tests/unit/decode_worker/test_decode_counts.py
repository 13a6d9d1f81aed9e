"""Steps are counted by what was in them, once each."""

from core import telemetry
from core.config import Mode
from decode_worker.counts import StepCounts
from decode_worker.step_log import StepFacts
from tests.unit.decode_worker.driver import LAYOUT, World


def counted(counts):
    """By metric and labels less the worker's name: how often, and the sum or value."""
    return {
        (sample.entry.name.removeprefix("twophase_"), *sample.labels[1:]): (
            sum(sample.counts),
            sample.value,
        )
        for sample in counts.tally.samples("decode-0")
    }


def test_a_chunked_workers_steps_are_told_apart_by_kind():
    world = World(Mode.CHUNKED, budget=8)
    counts = world.worker.counts
    assert counted(counts)["step_seconds", "decode"] == (0, 0.0)  # there from the start
    world.reserve(num_tokens=6, is_local=True, max_tokens=5)
    world.step()  # reads the prompt, and makes the first token
    world.step()
    world.reserve(request_id="other", num_tokens=6, first=100, is_local=True, max_tokens=1)
    for _ in range(3):
        world.step()
    found = counted(counts)
    assert found["step_seconds", "prefill"] == (1, 0.25)
    assert found["step_seconds", "mixed"] == (1, 0.25)
    assert found["step_seconds", "decode"] == (3, 0.75)
    assert found["worker_prompt_tokens_total", "decode"] == (0, 12)
    assert found["worker_output_tokens_total",] == (0, 4)
    # each reads the KV of all tokens before the one that it computes
    num_read = 6 + 7 + 8 + 9
    assert found["decode_step_kv_read_bytes",] == (4, num_read * LAYOUT.token_bytes)
    assert found["decode_step_seconds", "1", "1024"] == (3, 0.75)
    assert world.worker.num_steps == 5


def test_decode_steps_are_told_by_batch_and_by_history():
    counts = StepCounts(token_bytes=2)
    for num_sequences, num_history_tokens in ((1, 1024), (1, 1025), (64, 9000), (65, 10**6)):
        counts.step(StepFacts(1.0, 0.5, num_sequences, num_history_tokens, ()))
    by_size = {
        sample.labels[1:]: sum(sample.counts)
        for sample in counts.tally.samples("decode-0")
        if sample.entry is telemetry.DECODE_STEP
    }
    assert by_size == {("1", "1024"): 1, ("1", "8192"): 1, ("64", "65536"): 1, ("inf", "inf"): 1}
