"""How long steps and moves take: models with coefficients fitted to measured figures.

The figures are those of docs/measurements.md (one core, SmolLM2-135M in bfloat16, 2026-11-30);
another machine is simulated by fitting to its own `make bench-engine` and `make bench-transfer`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# (prompt tokens, seconds): 1,600 and 1,100 tokens/s.
PREFILL_MEASURED = ((512, 512 / 1600), (2048, 2048 / 1100))
# (sequences of 512 tokens of history, seconds of a step): 14.6, 147 and 163 tokens/s.
DECODE_MEASURED = ((1, 1 / 14.6), (8, 8 / 147), (16, 16 / 163))
DECODE_HISTORY_TOKENS = 512
# A token's KV in bfloat16 (22.5 KiB) at the measured 10 GB/s of a core.
DECODE_KV_S_PER_TOKEN = 23_040 / 10e9
# Whole handoffs of 512 tokens, and what the last piece of one costs a request.
LINK_BYTES_PER_S = {"shm": 4.5e9, "torch": 1.6e9, "nixl": 1.9e9}
LINK_LATENCY_S = 1.7e-3


@dataclass(frozen=True, slots=True)
class Machine:
    """Coefficients of one worker's device and links.

    A prefill step of n tokens after c tokens of the same prompt takes
    prefill_token_s * n + prefill_pair_s * n * (c + n / 2): weights and attention. A decode step of
    B sequences with H tokens of history in all takes decode_kv_s * H more than decode_steps_s
    tell, (B, seconds) in order of B: between two of them a line, beyond the last one its slope.
    A request takes request_s outside of both phases. Where workers of both share a host, steps take
    prefill_crowding and decode_crowding times as long while the other phase works.
    """

    prefill_token_s: float
    prefill_pair_s: float
    decode_steps_s: tuple[tuple[int, float], ...]
    decode_kv_s: float
    link_bytes_per_s: float
    link_latency_s: float = LINK_LATENCY_S
    request_s: float = 0.0
    prefill_crowding: float = 1.0
    decode_crowding: float = 1.0

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Seconds for a chunk of one prompt, `num_before` of whose tokens are read."""
        num_pairs = num_tokens * (num_before + num_tokens / 2)
        return self.prefill_token_s * num_tokens + self.prefill_pair_s * num_pairs

    def decode_s(self, num_sequences: int, num_history_tokens: float) -> float:
        """Seconds for one token of each sequence."""
        steps = self.decode_steps_s
        step_s = steps[0][1]
        if len(steps) > 1 and num_sequences > steps[0][0]:
            above = min(bisect_left(steps, (num_sequences, 0.0)), len(steps) - 1)
            (fewer, lower_s), (more, upper_s) = steps[above - 1], steps[above]
            slope_s = (upper_s - lower_s) / (more - fewer)
            if num_sequences > more:
                slope_s = max(slope_s, 0.0)
            step_s = upper_s + slope_s * (num_sequences - more)
        return step_s + self.decode_kv_s * num_history_tokens


def fitted(
    prefill: Sequence[tuple[int, float]] = PREFILL_MEASURED,
    decode: Sequence[tuple[int, float]] = DECODE_MEASURED,
    *,
    link_bytes_per_s: float = LINK_BYTES_PER_S["shm"],
) -> Machine:
    """The machine whose prefill comes closest, in least squares, to what was measured.

    Args:
        prefill: (tokens of a whole prompt, seconds to read it).
        decode: (sequences with DECODE_HISTORY_TOKENS tokens of history, seconds of a step), which
            are taken as they are.
        link_bytes_per_s: what a link carries while it is busy.
    """
    token_s, pair_s = not_negative([(n, n * n / 2) for n, _ in prefill], [s for _, s in prefill])
    steps_s = tuple(
        (n, max(s - DECODE_KV_S_PER_TOKEN * DECODE_HISTORY_TOKENS * n, 0.0))
        for n, s in sorted(decode)
    )
    return Machine(token_s, pair_s, steps_s, DECODE_KV_S_PER_TOKEN, link_bytes_per_s)


def not_negative(rows: Sequence[tuple[float, ...]], values: Sequence[float]) -> tuple[float, ...]:
    """Least squares; columns whose coefficients would be negative are left out, and theirs 0."""
    matrix, wanted = np.array(rows, dtype=float), np.array(values)
    kept = list(range(matrix.shape[1]))
    while kept:
        found = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    coefficients = np.zeros(matrix.shape[1])
    coefficients[kept] = found if kept else 0.0
    return tuple(float(value) for value in coefficients)
