"""One tick, told: what went in, the stage, the rule of each pool, what came out, in words."""

from dataclasses import asdict, dataclass
from typing import Any

from core.request import WorkerName
from core.signals import Demand
from core.worker import Role
from deploy.autoscaler.facts import LinkView, PoolView
from deploy.autoscaler.stage import Finding
from deploy.autoscaler.wish import Rule


@dataclass(frozen=True, slots=True)
class Start:
    """Start so many workers in a pool."""

    role: Role
    num_workers: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Give these workers nothing new, and stop each once it is empty."""

    names: tuple[WorkerName, ...]


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Drain these workers, and start each again in the other pool."""

    names: tuple[WorkerName, ...]
    to: Role


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End these workers, which have not come up in time."""

    names: tuple[WorkerName, ...]


Action = Start | Drain | ChangeRole | GiveUp


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """What was decided for one pool: workers before and after, what it needs (None: unknown)."""

    role: Role
    view: PoolView
    before: int
    needed: int | None
    after: int
    rule: Rule
    why: str

    @property
    def sentence(self) -> str:
        """In words: `prefill 2 -> 3 (late): prompts wait 2.10 s ...`."""
        change = f"{self.before} -> {self.after}" if self.after != self.before else "stays at"
        number = "" if self.after != self.before else f" {self.after}"
        return f"{self.role.value} {change}{number} ({self.rule.value}): {self.why}"


@dataclass(frozen=True, slots=True)
class Record:
    """One tick."""

    now_s: float
    finding: Finding
    pools: tuple[PoolRecord, ...]
    link: LinkView
    demand: Demand
    actions: tuple[Action, ...]
    is_dry_run: bool = False

    @property
    def is_change(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.actions)

    @property
    def sentence(self) -> str:
        """The tick in one sentence."""
        pools = "; ".join(pool.sentence for pool in self.pools)
        only_said = " (dry run: nothing is changed)" if self.is_dry_run else ""
        return f"held back by {self.finding.stage.value}: {pools}{only_said}"

    def to_json(self) -> dict[str, Any]:  # Any: nested values of all kinds, for json.dumps
        """Everything, for a log that programs read."""
        actions = [{type(action).__name__: asdict(action)} for action in self.actions]
        return {**asdict(self), "actions": actions, "sentence": self.sentence}
