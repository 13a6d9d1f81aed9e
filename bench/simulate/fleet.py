"""Simulated workers that start, serve, drain and change roles, and what they cost.

STARTING --start_s--> SERVING --drain--> DRAINING --empty--> gone, or STARTING in the other pool
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.simulate.site import Site
from bench.simulate.worker import DecodeModel, PrefillModel
from core.request import WorkerName
from core.worker import Role
from deploy.autoscaler.facts import Life, WorkerFacts
from deploy.autoscaler.fit import Pair
from deploy.autoscaler.record import Action, ChangeRole, Drain, GiveUp, Start

Model = PrefillModel | DecodeModel


@dataclass(slots=True)
class _Member:
    facts: WorkerFacts
    born_s: float
    model: Model | None = None


class Fleet:
    """All workers; `changed` is called whenever another set of them serves.

    Invariant: a worker has a model from its start's end until it is gone.
    """

    def __init__(
        self,
        site: Site,
        make: Callable[[Role, WorkerName], Model],
        *,
        start_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._site = site
        self._make = make
        self._start_s = start_s
        self._changed = changed
        self._members: dict[WorkerName, _Member] = {}
        self._num_made = {role: 0 for role in Role}
        self._worker_s = 0.0

    @property
    def worker_s(self) -> float:
        """Seconds of all workers so far, those that start or drain included."""
        living = sum(self._site.now_s - member.born_s for member in self._members.values())
        return self._worker_s + living

    def count(self, role: Role) -> int:
        """Workers of a pool that serve, or will."""
        return sum(
            (m.facts.role is role and m.facts.life is not Life.DRAINING) or m.facts.becomes is role
            for m in self._members.values()
        )

    def serving(self, role: Role) -> list[Model]:
        """Those that are given requests."""
        return [
            m.model
            for m in self._members.values()
            if m.facts.role is role and m.facts.life is Life.SERVING and m.model is not None
        ]

    @property
    def names(self) -> set[WorkerName]:
        """All that live."""
        return set(self._members)

    def model(self, name: WorkerName) -> Model:
        """The worker of this name."""
        model = self._members[name].model
        assert model is not None
        return model

    def facts(self) -> tuple[WorkerFacts, ...]:
        """What the autoscaler is told of each."""
        now_s = self._site.now_s
        return tuple(
            m.facts if m.model is None else replace(m.facts, heard_s=now_s, load=m.model.load())
            for m in self._members.values()
        )

    def begin(self, numbers: Pair) -> None:
        """So many workers of each pool serve at once; called once, before all else."""
        for role, number in ((Role.PREFILL, numbers.prefill), (Role.DECODE, numbers.decode)):
            for _ in range(number):
                self._open(self._new(role))
        self._changed()

    def add(self, role: Role) -> None:
        """Start a worker; where faults have it, it never comes up."""
        name, now_s = self._new(role), self._site.now_s
        if self._site.faults.may_start(role, now_s):
            self._site.agenda.at(now_s + self._start_s, lambda: self._serve(name))

    def _new(self, role: Role) -> WorkerName:
        name = WorkerName(f"{role.value}-{self._num_made[role]}")
        self._num_made[role] += 1
        now_s = self._site.now_s
        self._members[name] = _Member(WorkerFacts(name, role, Life.STARTING, now_s), now_s)
        return name

    def do(self, actions: tuple[Action, ...]) -> None:
        """Carry out what was decided."""
        for action in actions:
            match action:
                case Start(role, num_workers):
                    for _ in range(num_workers):
                        self.add(role)
                case Drain(names):
                    self._drain(names, None)
                case ChangeRole(names, to):
                    self._drain(names, to)
                case GiveUp(names):
                    for name in names:
                        self._remove(name)
        if actions:
            self._changed()

    def lose(self, name: WorkerName) -> Model | None:
        """A worker is gone, and another is started in its place; the model that it had."""
        member = self._members[name]
        self._remove(name)
        is_leaving = member.facts.life is Life.DRAINING
        role = member.facts.becomes if is_leaving else member.facts.role
        if role is not None:
            self.add(role)
        self._changed()
        return member.model

    def sweep(self, name: WorkerName) -> None:
        """Let a worker go that drains and is empty now; nothing happens to others."""
        member = self._members.get(name)
        if member is None or member.facts.life is not Life.DRAINING:
            return
        if member.model is None or member.model.num_requests == 0:
            becomes = member.facts.becomes
            self._remove(name)
            if becomes is not None:
                self.add(becomes)

    def _serve(self, name: WorkerName) -> None:
        member = self._members.get(name)
        if member is not None and member.facts.life is Life.STARTING:
            self._open(name)
            self._changed()

    def _open(self, name: WorkerName) -> None:
        member = self._members[name]
        member.facts = replace(member.facts, life=Life.SERVING, since_s=self._site.now_s)
        member.model = self._make(member.facts.role, name)

    def _drain(self, names: tuple[WorkerName, ...], becomes: Role | None) -> None:
        for name in names:
            member = self._members[name]
            member.facts = replace(
                member.facts, life=Life.DRAINING, since_s=self._site.now_s, becomes=becomes
            )
            self.sweep(name)

    def _remove(self, name: WorkerName) -> None:
        self._worker_s += self._site.now_s - self._members.pop(name).born_s
