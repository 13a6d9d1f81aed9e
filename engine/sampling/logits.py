"""What a request changes about its logits before a token is drawn, and what it is told of them.

In this order, each row by itself and in float32: bias, stop tokens ruled out while the answer is
too short, then the penalties (the order of vLLM's sampler). Nothing here draws: `sampler` does.
Letters: B rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from core.request import Logprobs, Request, SamplingParams

Mask = npt.NDArray[np.bool_]
NO_MASKS: Mapping[int, Mask] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of a sequence before the one that is drawn, as its request sees them."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def history_of(request: Request, output_token_ids: Sequence[int]) -> History | None:
    """Prompt and answer of a request, of which this worker made output_token_ids; None unneeded."""
    if not request.sampling.needs_history:
        return None
    num_prompt_tokens = request.num_prompt_tokens - request.num_resumed_tokens
    prompt, resumed = (
        request.prompt_token_ids[:num_prompt_tokens],
        request.prompt_token_ids[num_prompt_tokens:],
    )
    return History(prompt, [*resumed, *output_token_ids])


def changed_logits(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History | None],
    masks: Mapping[int, Mask] = NO_MASKS,
) -> torch.Tensor:
    """The logits to draw from; the tensor itself when no request changes any.

    Args:
        logits_BV: the model's; not written to.
        params: of each row.
        histories: of each row; one that params.needs_history has is never None.
        masks: by row, what a grammar allows.
    """
    rows = [row for row, p in enumerate(params) if p.logit_bias or p.needs_history]
    if not rows and not masks:
        return logits_BV
    changed_BV = (
        logits_BV.float().clone() if logits_BV.dtype == torch.float32 else logits_BV.float()
    )
    for row in rows:
        _change(changed_BV[row], params[row], histories[row])
    for row, allowed in masks.items():
        forbidden = torch.from_numpy(~allowed).to(changed_BV.device)
        changed_BV[row].masked_fill_(forbidden, float("-inf"))
    return changed_BV


def logprobs_of(
    logits_BV: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[Logprobs, ...]:
    """Log-probabilities of one token per row under the unchanged logits, in float32."""
    logits_BV = logits_BV.float()
    totals_B1 = logits_BV.logsumexp(dim=-1, keepdim=True)
    ids_B1 = torch.tensor(token_ids, device=logits_BV.device)[:, None]
    chosen = (logits_BV.gather(1, ids_B1) - totals_B1)[:, 0].tolist()
    top = logits_BV.topk(min(num_top, logits_BV.shape[1]))
    rows = zip(chosen, top.indices.tolist(), (top.values - totals_B1).tolist(), strict=True)
    return tuple(Logprobs(c, tuple(zip(ids, tops, strict=True))) for c, ids, tops in rows)


def _change(logits_V: torch.Tensor, params: SamplingParams, history: History | None) -> None:
    for token_id, bias in params.logit_bias:
        logits_V[token_id] += bias
    if history is None:
        assert not params.needs_history
        return
    output = np.asarray(history.output_token_ids, dtype=np.int64)
    if len(output) < params.min_tokens:
        logits_V[list(params.stop_token_ids)] = float("-inf")
    if params.repetition_penalty != 1.0:
        prompt = np.asarray(history.prompt_token_ids, dtype=np.int64)
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, output]))).to(logits_V.device)
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(output, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        taken = torch.from_numpy(penalties.astype(np.float32)).to(logits_V.device)
        logits_V[torch.from_numpy(ids).to(logits_V.device)] -= taken
