"""Which stage holds requests back: decode slots, the link, the prefill queue, or none.

They are looked at from the end, because a later stage that is full lets requests pile up in the
earlier ones: read prompts that wait for a place at decode look like work of prefill otherwise. One
thing piles up forwards: blocks at decode are taken while their bytes wait for a link. So where the
link is late, a wait for decode is the link's, even if bytes that came together make some wait for a
slot: no more requests would get through for more workers. A full decode pool grants no blocks, so
it cannot keep a link busy.
"""

from dataclasses import dataclass
from enum import StrEnum

from core.settings.scaling import ScalingConfig
from core.signals import Demand
from deploy.autoscaler.facts import LinkView, PoolView

# A link that carries this share of what it can is the reason why bytes wait for it.
LINK_BUSY = 0.8


class Stage(StrEnum):
    """Where requests wait for longer than they should."""

    DECODE = "decode"
    LINK = "link"
    PREFILL = "prefill"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Finding:
    """The stage, and what shows it, as the rest of a sentence; is_wait: requests wait there."""

    stage: Stage
    why: str
    is_wait: bool = True


def find_stage(
    scaling: ScalingConfig,
    demand: Demand,
    prefill: PoolView | None,
    decode: PoolView,
    link: LinkView,
) -> Finding:
    """The last stage, from the first token backwards, that holds requests back."""
    is_link_late = (
        scaling.prefill is not None
        and link.wait_s > scaling.target_transfer_wait_s
        and link.use >= LINK_BUSY
    )
    why = _wait_for_decode(scaling, demand, decode)
    if why and not is_link_late:
        return Finding(Stage.DECODE, why)
    if decode.step_s is not None and decode.step_s > scaling.decode.target_step_s:
        target_ms = scaling.decode.target_step_s * 1e3
        why = f"a decode step takes {decode.step_s * 1e3:.0f} ms (target {target_ms:.0f} ms)"
        return Finding(Stage.DECODE, why, is_wait=False)
    if prefill is not None and scaling.prefill is not None:
        if is_link_late:
            carried = f"at {link.use:.0%} of what the links carry"
            return Finding(Stage.LINK, f"KV bytes wait {link.wait_s:.2f} s {carried}")
        wait_s = _wait_s(prefill, prefill.num_waiting)
        line_s = demand.oldest_in_line_s if demand.num_in_line else 0.0
        if max(wait_s, line_s) > scaling.prefill.target_wait_s:
            target = f"(target {scaling.prefill.target_wait_s:g} s)"
            return Finding(Stage.PREFILL, f"prompts wait {max(wait_s, line_s):.2f} s {target}")
    return Finding(Stage.NONE, "no stage is late")


def _wait_for_decode(scaling: ScalingConfig, demand: Demand, pool: PoolView) -> str:
    target_s = scaling.decode.target_wait_s
    # Where no pool reads prompts, who waits in line can only wait for decode.
    is_full = _is_full(scaling, pool) or scaling.prefill is None
    # Those that have blocks and no slot run by the worker's count.
    wait_s = _wait_s(pool, pool.num_waiting + max(pool.num_running - pool.num_slots, 0))
    if is_full and demand.num_in_line:
        wait_s = max(wait_s, demand.oldest_in_line_s)
    if wait_s > target_s:
        return f"requests wait {wait_s:.2f} s for decode slots (target {target_s:g} s)"
    return ""


def _is_full(scaling: ScalingConfig, pool: PoolView) -> bool:
    """Whether slots or blocks keep another request out; twice the slots may be reserved."""
    return pool.num_known > 0 and (
        pool.num_running >= pool.num_slots or pool.kv_use >= scaling.decode.max_kv_use
    )


def _wait_s(pool: PoolView, num_waiting: int) -> float:
    """The worst wait now; of those that wait no more only while others still do."""
    is_anybody = num_waiting > 0 or pool.oldest_wait_s > 0
    return max(pool.oldest_wait_s, pool.wait_p95_s) if is_anybody else 0.0
