"""A plain serving loop for tests: the smallest scheduler that mixes chunks and decodes."""

from dataclasses import dataclass, field

from core.request import SamplingParams
from engine.batch import SequenceStep
from engine.block_pool import BlockPool, Reservation
from engine.runner import Runner
from engine.sampling.logits import History


@dataclass
class LoopSequence:
    """One prompt on its way; `num_computed` tokens have KV in the blocks of `reservation`."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    reservation: Reservation | None = None
    num_computed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.max_tokens


def generate(
    runner: Runner,
    prompts: list[list[int]],
    *,
    max_tokens: list[int] | int,
    sampling: SamplingParams | list[SamplingParams] | None = None,
    chunk_tokens: int = 1 << 30,
    pool: BlockPool | None = None,
) -> list[list[int]]:
    """Outputs of all prompts, run together: each step takes every sequence's next chunk.

    Blocks come from `pool`, with prefix hits, and finished sequences are published and released.
    """
    pool = pool or BlockPool(runner.num_blocks, runner.layout.block_size)
    limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    params = sampling if isinstance(sampling, list) else [sampling or SamplingParams()]
    params = params if len(params) == len(prompts) else params * len(prompts)
    sequences = [LoopSequence(*each) for each in zip(prompts, limits, params, strict=True)]
    for sequence in sequences:
        _reserve(sequence, pool)
    while running := [s for s in sequences if not s.is_done]:
        steps = [_next_step(s, chunk_tokens) for s in running]
        result = runner.step(steps)
        for sequence, step, token_id in zip(running, steps, result.token_ids, strict=True):
            sequence.num_computed = step.end
            if token_id is not None:
                sequence.output.append(token_id)
    for sequence in sequences:
        pool.publish(sequence.tokens, sequence.reservation.block_ids, sequence.num_computed)
        pool.release(sequence.reservation.block_ids)
    assert pool.counts().used == 0
    return [sequence.output for sequence in sequences]


def _reserve(sequence: LoopSequence, pool: BlockPool) -> None:
    shared = pool.match_prefix(sequence.prompt)
    num_blocks = -(-(len(sequence.prompt) + sequence.max_tokens) // pool.block_size)
    sequence.reservation = pool.reserve(num_blocks - len(shared), shared=shared)
    assert sequence.reservation is not None, "the pool is too small for this test"
    sequence.num_computed = len(shared) * pool.block_size


def _next_step(sequence: LoopSequence, chunk_tokens: int) -> SequenceStep:
    tokens = sequence.tokens
    end = min(len(tokens), sequence.num_computed + chunk_tokens)
    is_last = end == len(tokens)
    return SequenceStep(
        tokens[sequence.num_computed : end],
        sequence.num_computed,
        sequence.reservation.block_ids,
        sequence.sampling if is_last else None,
        History(sequence.prompt, list(sequence.output)) if is_last else None,
    )
