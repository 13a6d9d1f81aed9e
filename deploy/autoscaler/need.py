"""How many workers each pool needs, by what was measured; None where that is not known.

Prefill: prompts per second, and the time that one worker takes for the mean prompt, as a line of
GI/G/m (`queueing`). Decode: the most that one of three rules asks for: slots (Little's law and the
same formula: an answer keeps its slot for decode_s), the step time against its target, and KV
blocks in use. The last two scale what is there by use over target, as Kubernetes' autoscaler does;
a step has a part that does not shrink with the batch, so this comes from above and does not
overshoot. Once blocks are short their use says nothing of what is missing: requests that wait do,
up to as much as is in use.
"""

import math
from dataclasses import dataclass

from core.settings.scaling import ScalingConfig
from core.signals import Demand
from deploy.autoscaler.facts import PoolView
from deploy.autoscaler.queueing import servers_for

# Below this share of its target the step time asks for nothing: rounding would keep a worker.
STEP_SLACK = 0.9
# Where blocks are short, so many times those in use are missing at most: of those in line, some may
# wait for prefill.
MAX_MISSING = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """Workers, and the measured reason as the rest of a sentence; None: nothing was measured.

    num_ample: workers for a somewhat larger load, where that was asked for.
    """

    num_workers: int | None
    why: str
    num_ample: int | None = None


def prefill_need(scaling: ScalingConfig, demand: Demand, pool: PoolView) -> Need:
    """For the pool that reads prompts."""
    assert scaling.prefill is not None
    num_tokens = pool.num_queued_tokens + demand.num_line_tokens
    if demand.requests_per_s == 0 and num_tokens == 0:
        return Need(0, "nobody asks")
    if not pool.is_known:
        return Need(None, "its workers have not told what they hold")
    prompt = demand.num_prompt_tokens
    if pool.tokens_per_s is None or prompt is None:
        return Need(None, "how fast it reads was not measured yet")
    service_s = prompt.mean / pool.tokens_per_s
    num_workers = servers_for(
        scaling.prefill.target_wait_s,
        demand.requests_per_s,
        service_s,
        arrival_scv=demand.arrival_scv,
        scv=prompt.scv,
    )
    busy = demand.requests_per_s * service_s
    backlog_s = num_tokens / pool.tokens_per_s
    num_to_catch_up = math.ceil(busy + backlog_s / scaling.catch_up_s)
    if num_to_catch_up > num_workers:
        why = f"{num_tokens} prompt tokens wait, to be read in {scaling.catch_up_s:g} s"
        return Need(num_to_catch_up, why)
    return Need(
        num_workers,
        f"{demand.requests_per_s:.2f} prompts/s of {prompt.mean:.0f} tokens keep {busy:.2f} "
        f"workers of {pool.tokens_per_s:.0f} tokens/s busy",
    )


def decode_need(scaling: ScalingConfig, demand: Demand, pool: PoolView) -> Need:
    """For the pool that makes tokens."""
    if demand.requests_per_s == 0 and not (pool.num_running + pool.num_waiting):
        if not demand.num_in_line:
            return Need(0, "nobody asks")
    if not pool.is_known or pool.num_slots == 0:
        return Need(None, "its workers have not told what they hold")
    if demand.decode_s is None:
        return Need(None, "how long an answer takes was not measured yet")
    needs = [
        _by_slots(scaling, demand, pool),
        _by_step(scaling, pool),
        _by_blocks(scaling, demand, pool),
    ]
    return max(needs, key=lambda need: need.num_workers or 0)


def _by_slots(scaling: ScalingConfig, demand: Demand, pool: PoolView) -> Need:
    assert demand.decode_s is not None
    hold = demand.decode_s
    num_slots = servers_for(
        scaling.decode.target_wait_s,
        demand.requests_per_s,
        hold.mean,
        arrival_scv=demand.arrival_scv,
        scv=hold.scv,
    )
    busy = demand.requests_per_s * hold.mean
    num_waiting = pool.num_waiting + demand.num_in_line
    num_slots = max(num_slots, math.ceil(busy + num_waiting * hold.mean / scaling.catch_up_s))
    return Need(
        math.ceil(num_slots / pool.num_slots_each),
        f"{demand.requests_per_s:.2f} answers/s of {hold.mean:.1f} s keep {busy:.1f} of "
        f"{pool.num_slots_each:.0f} slots a worker busy",
    )


def _by_step(scaling: ScalingConfig, pool: PoolView) -> Need:
    target_s = scaling.decode.target_step_s
    if pool.step_s is None or pool.num_running == 0:
        return Need(0, "")
    use = pool.step_s / target_s
    num_workers = math.ceil(pool.num_known * use) if use > STEP_SLACK else 0
    step = f"a step takes {pool.step_s * 1e3:.0f} ms, to be {target_s * 1e3:.0f} ms"
    # Where one sequence alone takes too long, more workers help nobody.
    return Need(min(num_workers, max(pool.num_running, 1)), step)


def _by_blocks(scaling: ScalingConfig, demand: Demand, pool: PoolView) -> Need:
    share = pool.kv_use / scaling.decode.max_kv_use
    why = f"{pool.kv_use:.0%} of the KV blocks are in use"
    num_waiting = pool.num_waiting + demand.num_in_line
    if share >= 1 and num_waiting and pool.num_reservations:
        # More than all cannot be in use, so those that wait are counted as those that hold some.
        share *= 1 + min(num_waiting / pool.num_reservations, MAX_MISSING)
        why += f", and {num_waiting} requests wait beside {pool.num_reservations} that hold some"
    return Need(math.ceil(pool.num_known * share), why)
