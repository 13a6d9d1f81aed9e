"""From logits to token ids: greedy, or drawn by a counter-based generator.

A draw depends on (seed, absolute position) and the row's own logits alone: not on the batch, the
worker, or what was drawn before. So a request that is moved, resumed or batched with others draws
what it would have drawn. Letters: B rows, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from core.errors import TwophaseError
from core.request import Logprobs, SamplingParams
from engine.batch import SequenceStep, StepResult
from engine.sampling.logits import Mask, changed_logits, logprobs_of

PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
PHILOX_ROUNDS = 10
LOW_32 = np.uint64(0xFFFFFFFF)
NUM_FIRST_CANDIDATES = 256


def sample(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """One token id per row; positions are those that the drawn tokens will have.

    temperature 0 takes the largest logit, the lowest id of equals. Otherwise temperature, min_p,
    top_k, top_p in this order, in float32; tokens that tie with the last one kept are kept too.
    """
    token_ids = _largest(logits_BV)
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return token_ids
    uniforms = uniform([params[row].seed for row in rows], [positions[row] for row in rows])
    for row, uniform_ in zip(rows, uniforms.tolist(), strict=True):
        token_ids[row] = _draw(logits_BV[row], params[row], uniform_)
    return token_ids


def sampled_tokens(
    logits_BV: torch.Tensor,
    steps: Sequence[SequenceStep],
    masks: Mapping[int, "Future[Mask | TwophaseError]"],
) -> StepResult:
    """What each step asks for: a token, log-probabilities of its targets; compute_s is 0.

    logits_BV has step.num_logits rows of each step, in order.
    """
    logits_BV, prompt_logprobs = _without_targets(logits_BV, steps)
    rows = [(i, step, step.sampling) for i, step in enumerate(steps) if step.sampling is not None]
    params = [sampling for _, _, sampling in rows]
    token_ids: list[int | None] = [None] * len(steps)
    logprobs: dict[int, Logprobs] = {}
    failures: dict[int, TwophaseError] = {}
    allowed: dict[int, Mask] = {}
    for row, (i, _, _) in enumerate(rows):
        mask = masks[i].result() if i in masks else None
        if isinstance(mask, TwophaseError):
            failures[i] = mask
        elif mask is not None:
            allowed[row] = mask
    histories = [step.history for _, step, _ in rows]
    changed_BV = changed_logits(logits_BV, params, histories, allowed)
    drawn = sample(changed_BV, params, [step.end for _, step, _ in rows])
    for (i, _, sampling), logits_V, token_id in zip(rows, logits_BV, drawn, strict=True):
        if i in failures:
            continue
        token_ids[i] = token_id
        if sampling.num_logprobs is not None:
            [logprobs[i]] = logprobs_of(logits_V[None], [token_id], sampling.num_logprobs)
    return StepResult(token_ids, 0.0, logprobs, failures, prompt_logprobs)


def _without_targets(
    logits_BV: torch.Tensor, steps: Sequence[SequenceStep]
) -> tuple[torch.Tensor, dict[int, tuple[Logprobs, ...]]]:
    """The rows to sample from, and by index of the step what is told of its targets."""
    told: dict[int, tuple[Logprobs, ...]] = {}
    if not any(step.targets for step in steps):
        return logits_BV, told
    sampled, end = [], 0
    for i, step in enumerate(steps):
        start, end = end, end + step.num_logits
        if step.targets:
            rows_SV = logits_BV[start : start + len(step.targets)]
            told[i] = logprobs_of(rows_SV, step.targets, step.num_top)
        if step.sampling is not None:
            sampled.append(end - 1)
    return logits_BV[sampled], told


def _largest(logits_BV: torch.Tensor) -> list[int]:
    """The id of each row's largest logit, the lowest of equals."""
    if logits_BV.device.type == "cpu":  # numpy's argmax is vectorised, torch's is not: 4-15 x
        return [int(i) for i in logits_BV.float().numpy().argmax(axis=-1)]
    return [int(i) for i in first_largest(logits_BV).tolist()]


def first_largest(logits_BV: torch.Tensor) -> torch.Tensor:
    """The same on any device, as a tensor; torch's argmax takes any of equals."""
    last = logits_BV.shape[1] - 1
    ids_V = torch.arange(last + 1, device=logits_BV.device)
    is_largest_BV = logits_BV == logits_BV.amax(dim=-1, keepdim=True)
    return torch.where(is_largest_BV, ids_V, last).amin(dim=-1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) per pair, of 52 random bits.

    With 52 bits the product of any total and the largest value is less than that total.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): the key is
    the seed, the counter is the position.
    """
    counters = np.asarray(positions, np.uint64)
    words = philox(np.asarray(seeds, np.uint64), counters, np.zeros_like(counters))
    return ((words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))) * 2.0**-52


def philox(keys: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """Four random words of 32 bits (held as uint64) per 64-bit key and 128-bit counter."""
    key_low, key_high = keys & LOW_32, keys >> np.uint64(32)
    x0, x1 = low & LOW_32, low >> np.uint64(32)
    x2, x3 = high & LOW_32, high >> np.uint64(32)
    for _ in range(PHILOX_ROUNDS):
        product_0, product_2 = x0 * PHILOX_MULTIPLIERS[0], x2 * PHILOX_MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (product_2 >> np.uint64(32)) ^ x1 ^ key_low,
            product_2 & LOW_32,
            (product_0 >> np.uint64(32)) ^ x3 ^ key_high,
            product_0 & LOW_32,
        )
        key_low = (key_low + PHILOX_WEYL[0]) & LOW_32
        key_high = (key_high + PHILOX_WEYL[1]) & LOW_32
    return [x0, x1, x2, x3]


def _draw(logits_V: torch.Tensor, params: SamplingParams, uniform_: float) -> int:
    """Inverse of the cumulative distribution, summed by rising token id.

    By id and not by probability: two logits that change places by rounding then move the result
    only if `uniform_` lies within rounding of a boundary.
    """
    scaled_V = logits_V.float() / params.temperature
    if params.min_p > 0.0:
        least = scaled_V.max() + math.log(params.min_p)
        scaled_V = scaled_V.masked_fill(scaled_V < least, float("-inf"))
    if 0 < params.top_k < scaled_V.numel():
        least = scaled_V.topk(params.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, float("-inf"))
    probabilities_V = scaled_V.softmax(dim=-1)
    if params.top_p < 1.0:
        least = _nucleus_least(probabilities_V, params.top_p)
        probabilities_V = probabilities_V.masked_fill(probabilities_V < least, 0.0)
    cumulative_V = probabilities_V.double().cumsum(dim=-1)
    target = cumulative_V[-1] * uniform_
    return int(torch.searchsorted(cumulative_V, target, right=True))


def _nucleus_least(probabilities_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least probability in the smallest set of likeliest tokens with at least `top_p`.

    Nucleus sampling (Holtzman et al. 2020, s.3.1). Sorts only as many tokens as needed.
    """
    size = probabilities_V.numel()
    for num_candidates in (min(NUM_FIRST_CANDIDATES, size), size):
        candidates = probabilities_V.topk(num_candidates).values
        num_below = int((candidates.double().cumsum(dim=-1) < top_p).sum())
        if num_below < num_candidates:
            return candidates[num_below]
    return candidates[-1]
