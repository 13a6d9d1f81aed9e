"""The configuration of a running cluster, and what of it may change without a restart.

    serve reads its file again --> `changes_between` refuses or allows --> the router is told
      --> the new configuration replaces the old one --> the scaler takes it at its next tick

All or nothing: a file with one key that cannot change, or that the router refuses, changes nothing.
Knows neither signals nor files.
"""

import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from core.config import ClusterConfig
from core.errors import ConfigError, TwophaseError
from core.settings.router import RouterConfig
from twophase.policy_wire import POLICY_KEYS

_LIVE_ROUTER_KEYS = frozenset(f"router.{key}" for key in POLICY_KEYS)
# With `scaling` they say only where pools begin.
_START_KEYS = frozenset({"prefill.replicas", "decode.replicas"})


@dataclass(frozen=True, slots=True)
class Change:
    """One key, dotted, and what it was and is to be."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        """`scaling.budget 3.0 -> 4.0`; what stands under security is not told."""
        if self.key.startswith("security."):
            return self.key
        return f"{self.key} {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Reload:
    """What came of one look at the file; refusal is why nothing changed, empty if it was taken."""

    changes: tuple[Change, ...] = ()
    refusal: str = ""

    @property
    def sentence(self) -> str:
        """In words."""
        if self.refusal:
            return f"the new configuration was refused, and nothing changed: {self.refusal}"
        if not self.changes:
            return "the configuration was read again: nothing differs"
        return f"the configuration changed: {'; '.join(map(str, self.changes))}"

    def to_json(self, now_s: float) -> dict[str, Any]:  # Any: for json.dumps, beside decisions
        """For the log of decisions."""
        changes = {change.key: [change.before, change.after] for change in self.changes}
        return {"now_s": now_s, "reload": changes, "actions": [], "sentence": self.sentence}


class LiveConfig:
    """The configuration in force.

    Invariant: `current` is always one whole configuration; who reads it once per decision never
    sees half of a change. `news` holds each reload until the scaler's thread, if any, has told it.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.current = config
        self.news: queue.SimpleQueue[Reload] = queue.SimpleQueue()

    def reload(
        self, read: Callable[[], ClusterConfig], tell_router: Callable[[RouterConfig], None]
    ) -> Reload:
        """Take what `read` gives, if all of it may change now; told in `news` either way.

        Contract: called by one thread; idempotent.
        """
        try:
            wanted = read()
            changes = changes_between(self.current, wanted)
            if any(change.key in _LIVE_ROUTER_KEYS for change in changes):
                tell_router(wanted.router)
        except TwophaseError as error:
            reload = Reload(refusal=str(error))
        else:
            self.current, reload = wanted, Reload(changes)
        if self.current.scaling is not None:  # there is a scaler, which takes it
            self.news.put(reload)
        return reload


def changes_between(running: ClusterConfig, wanted: ClusterConfig) -> tuple[Change, ...]:
    """What is to change, each of which may.

    Raises:
        ConfigError: something would need a restart; every such key is told with both values.
    """
    if (running.scaling is None) != (wanted.scaling is None):
        raise ConfigError("scaling", "needs a restart to come or to go")
    before, after = dict(_leaves(running)), dict(_leaves(wanted))
    changes = tuple(
        Change(key, before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    )
    may_change = _LIVE_ROUTER_KEYS if running.scaling is None else _LIVE_ROUTER_KEYS | _START_KEYS
    fixed = [c for c in changes if c.key not in may_change and not c.key.startswith("scaling.")]
    if fixed:
        told = "; ".join(map(str, fixed))
        raise ConfigError(fixed[0].key, f"needs a restart to change ({told})")
    return changes


def _leaves(config: ClusterConfig) -> Iterator[tuple[str, object]]:
    """Every dotted key with its value; a prefill pool that is only implied counts as given."""
    if config.prefill_pool is not None:
        config = config.model_copy(update={"prefill": config.prefill_pool})
    return _walk("", config.model_dump(mode="json"))


def _walk(path: str, tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(f"{path}{key}.", value)
        else:
            yield f"{path}{key}", value
