"""How others scale, on the same facts, to compare with.

Both follow the rule of Kubernetes' HorizontalPodAutoscaler: workers x value / target, nothing
within 10 % of the target, up at once, down to the most of the last 300 s. Queue length counts
requests that wait for a pool (as KEDA and llm-d's examples do), utilisation the busy share of
prefill devices and of decode slots. Neither knows the link, or tells the stages apart.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from core.settings.scaling import ScalingConfig
from core.worker import Role
from deploy.autoscaler.autoscaler import steps_to
from deploy.autoscaler.facts import ClusterFacts, PoolView
from deploy.autoscaler.fit import Pair, fit
from deploy.autoscaler.record import Action
from deploy.autoscaler.survey import Survey

TOLERANCE = 0.1
DOWN_WINDOW_S = 300.0
QUEUED_EACH = 2.0
TARGET_USE = 0.7

# Pool, its view, all facts -> the metric over its target.
Metric = Callable[[Role, PoolView, ClusterFacts], float]


def queue_length(role: Role, view: PoolView, facts: ClusterFacts) -> float:
    """Requests that wait for this pool, for each worker, over QUEUED_EACH."""
    waiting = view.num_waiting + max(view.num_running - view.num_slots, 0) * (role is Role.DECODE)
    return (waiting + facts.demand.num_in_line) / max(view.num_workers, 1) / QUEUED_EACH


def utilisation(role: Role, view: PoolView, facts: ClusterFacts) -> float:
    """Busy share of the pool's devices (prefill) or slots (decode), over TARGET_USE."""
    if role is Role.DECODE:
        return min(view.num_running / max(view.num_slots, 1), 1.0) / TARGET_USE
    prompt = facts.demand.num_prompt_tokens
    if prompt is None or view.tokens_per_s is None:
        return 0.0
    busy = facts.demand.requests_per_s * prompt.mean / view.tokens_per_s
    return min(busy / max(view.num_workers, 1), 1.0) / TARGET_USE


@dataclass(slots=True)
class HorizontalScaler:
    """One metric for both pools, each by itself; the budget is shared as ours is."""

    scaling: ScalingConfig
    metric: Metric
    _wanted: dict[Role, deque[tuple[float, int]]] = field(
        default_factory=lambda: {role: deque() for role in Role}
    )

    def __call__(self, facts: ClusterFacts, now_s: float) -> tuple[Action, ...]:
        """What to do now."""
        survey = Survey.of(self.scaling, facts, now_s)
        numbers = {role: self._pool(role, survey, facts, now_s) for role in Role}
        wanted = Pair(numbers[Role.PREFILL], numbers[Role.DECODE])
        target = fit(self.scaling, wanted, drained_cost=survey.drained_cost)
        return steps_to(target, survey.staff, may_change=True) if target is not None else ()

    def _pool(self, role: Role, survey: Survey, facts: ClusterFacts, now_s: float) -> int:
        view, wanted = survey.views[role], self._wanted[role]
        share = self.metric(role, view, facts)
        is_near = abs(share - 1) <= TOLERANCE
        number = view.num_workers if is_near else math.ceil(view.num_workers * share)
        wanted.append((now_s, max(number, 1)))
        while wanted[0][0] < now_s - DOWN_WINDOW_S:
            wanted.popleft()
        return max(number for _, number in wanted)
