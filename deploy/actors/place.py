"""Places on a Ray cluster's nodes, and the nodes that are asked for.

A worker's place is a placement group of one bundle, named like its actor and as lasting, so that
Ray keeps it while the worker is started again by whoever controls the cluster then. A place that
no node has room for is pending: it holds up nobody, and is given back like any other.

Nodes: where `scaling.ask_for_nodes` says so, Ray's autoscaler is told the sum of all places, before
one is taken and after one was given back, so that nodes come before workers and go after them.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray._private.state import available_resources_per_node
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from core.worker import Role
from deploy.actors.name import actor_name, server_of_name
from deploy.actors.node_choice import Need, Node, wish_of

NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one worker; best is the node that it was meant for while it is pending."""

    worker: str
    role: Role
    need: Need
    group: PlacementGroup
    best: str | None = None

    def why_pending(self) -> str | None:
        """What it waits for; None once a node has room."""
        if _table(self.group).get("state") == "CREATED":
            return None
        bundle = ", ".join(f"{name}: {much:g}" for name, much in self.need.bundle.items())
        return f"no node has room for {{{bundle}}} ({self.need.strategy.value})"


class Places:
    """The places of one cluster.

    Invariant: the demand for nodes is the sum of the places that are held; thread-safe.
    """

    def __init__(self, cluster: str, *, asks_for_nodes: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._asks_for_nodes = asks_for_nodes
        self._held: dict[str, Place] = {}
        self._lock = threading.Lock()

    def take(self, worker: str, role: Role, need: Need) -> Place:
        """A place for a worker that starts; it may be pending."""
        with self._lock:
            wish = wish_of(need, self._nodes(role))
            self._ask([*self._held.values()], need)
            group = placement_group(
                [dict(need.bundle)],
                strategy="STRICT_PACK",
                name=actor_name(self._cluster, worker),
                lifetime="detached",
                _soft_target_node_id=wish.best,
                bundle_label_selector=_all_but(wish.excluded),
            )
            place = self._held[worker] = Place(worker, role, need, group, wish.best)
            return place

    def adopt(self, worker: str, role: Role, need: Need) -> Place | None:
        """The place of a worker that lives; None if it has none any more."""
        try:
            group = get_placement_group(actor_name(self._cluster, worker))
        except ValueError:
            return None
        with self._lock:
            place = self._held[worker] = Place(worker, role, need, group)
            self._ask([*self._held.values()])
            return place

    def free(self, place: Place) -> None:
        """Give a place back; idempotent."""
        with self._lock:
            if self._held.get(place.worker) is place:
                del self._held[place.worker]
                remove_placement_group(place.group)
                self._ask([*self._held.values()])

    def sweep(self, living: Collection[str]) -> None:
        """Give back the places of all but the workers named: theirs are gone, and left no one.

        Contract: called before a place is taken, since a name that is left over cannot be used.
        """
        for group in groups_of(self._cluster):
            if server_of_name(self._cluster, group["name"]) not in living:
                remove_placement_group(get_placement_group(group["name"]))

    def _nodes(self, role: Role) -> list[Node]:
        """Living nodes with all that they have, and the workers of the pool on each."""
        placed = Counter(
            _table(place.group).get("bundles_to_node_id", {}).get(0) or place.best
            for place in self._held.values()
            if place.role is role
        )
        return [
            Node(node["NodeID"], node["Resources"], placed[node["NodeID"]])
            for node in living_nodes()
        ]

    def _ask(self, places: Sequence[Place], *more: Need) -> None:
        if self._asks_for_nodes():
            needs = [*(place.need for place in places), *more]
            request_resources(bundles=[dict(need.bundle) for need in needs])


def free_nodes() -> list[Node]:
    """Living nodes with what they have free."""
    # Any: Ray has no types for it.
    free = cast(Any, available_resources_per_node)()
    return [Node(node["NodeID"], free.get(node["NodeID"], {})) for node in living_nodes()]


def living_nodes() -> list[dict[str, Any]]:  # Any: Ray has no types for it
    """What Ray tells of each node that lives."""
    return [node for node in cast(Any, ray).nodes() if node["Alive"]]


def groups_of(cluster: str) -> list[dict[str, Any]]:  # Any: as above
    """What Ray tells of each placement group of the cluster that is not removed."""
    table = cast(dict[str, dict[str, Any]], placement_group_table())
    return [
        group
        for group in table.values()
        if server_of_name(cluster, group["name"]) is not None and group["state"] != "REMOVED"
    ]


def _table(group: PlacementGroup) -> dict[str, Any]:  # Any: as above
    return cast(dict[str, Any], placement_group_table(group))


def _all_but(node_ids: Sequence[str]) -> list[dict[str, str]] | None:
    return [{NODE_ID_LABEL: f"!in({','.join(node_ids)})"}] if node_ids else None
