"""Where in a Ray cluster a worker should go, and whether a whole cluster finds room.

Pure: nodes and needs in, a wish out; Ray does the placing (`deploy.actors.place`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.config import ClusterConfig, PoolConfig
from core.errors import ConfigError
from core.settings.resources import Strategy
from core.worker import Role

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker of a pool takes of a node, and how those of the pool are dealt out."""

    bundle: Bundle
    strategy: Strategy

    @classmethod
    def of(cls, pool: PoolConfig, device: str) -> "Need":
        """Of the workers of `pool`, computing on `device`."""
        own = pool.resources
        num_cards = pool.tensor_parallel if device == "cuda" else 0
        bundle = {
            "CPU": pool.num_worker_threads if own.cpus is None else own.cpus,
            "GPU": num_cards if own.gpus is None else own.gpus,
            **own.custom,
        }
        return cls({name: float(much) for name, much in bundle.items() if much}, own.strategy)


@dataclass(frozen=True, slots=True)
class Node:
    """A living node: what it has in all, or has free, and how many workers of the pool."""

    node_id: str
    resources: Bundle
    num_workers: int = 0

    def has_room(self, bundle: Bundle) -> bool:
        """Whether a worker that takes `bundle` could be there."""
        return all(self.resources.get(name, 0.0) >= much for name, much in bundle.items())

    def less(self, bundle: Bundle) -> "Node":
        """The node with one worker more, which takes `bundle` of what is free."""
        left = {name: much - bundle.get(name, 0.0) for name, much in self.resources.items()}
        return Node(self.node_id, left, self.num_workers + 1)


@dataclass(frozen=True, slots=True)
class Wish:
    """The node that is best, if it has room; nodes that must not be taken."""

    best: str | None = None
    excluded: tuple[str, ...] = ()


def wish_of(need: Need, nodes: Sequence[Node]) -> Wish:
    """Where the next worker of a pool goes; `nodes` with all that they have.

    Contract: side-effect free.
    """
    fitting = [node for node in nodes if node.has_room(need.bundle)]
    match need.strategy:
        case Strategy.STRICT_SPREAD:
            return Wish(excluded=tuple(node.node_id for node in nodes if node.num_workers))
        case Strategy.SPREAD:
            best = min(fitting, key=lambda node: (node.num_workers, node.node_id), default=None)
        case Strategy.PACK:
            with_some = [node for node in fitting if node.num_workers]
            best = min(with_some, key=lambda node: (-node.num_workers, node.node_id), default=None)
    return Wish(best=best.node_id if best is not None else None)


def require_room(config: ClusterConfig, nodes: Sequence[Node]) -> None:
    """Refuse a cluster whose first workers do not fit; `nodes` with what they have free.

    Raises:
        ConfigError: naming the pool, what it needs, and what is free.
    """
    pools: dict[Role, PoolConfig] = {Role.DECODE: config.decode}
    if config.prefill_pool is not None:
        pools[Role.PREFILL] = config.prefill_pool
    left = list(nodes)
    for role, pool in pools.items():
        need = Need.of(pool, config.engine.device)
        for number in range(pool.replicas):
            index = next(
                (i for i, node in enumerate(left) if _takes(node, need, nodes[i])),
                None,
            )
            if index is None:
                raise ConfigError(
                    f"{role.value}.resources",
                    f"{pool.replicas} workers need {_words(need.bundle)} each, and {number} of "
                    f"them find room; free before the start: {_free(nodes, need)}",
                )
            left[index] = left[index].less(need.bundle)
        left = [Node(node.node_id, node.resources) for node in left]


def _takes(node: Node, need: Need, before: Node) -> bool:
    is_taken = need.strategy is Strategy.STRICT_SPREAD and node.num_workers > before.num_workers
    return node.has_room(need.bundle) and not is_taken


def _free(nodes: Sequence[Node], need: Need) -> str:
    """What the nodes have of the resources that are needed."""
    if not nodes:
        return "no node is there"
    return ", ".join(
        f"{_words({name: node.resources.get(name, 0.0) for name in need.bundle})} on "
        f"{node.node_id[:8]}"
        for node in nodes
    )


def _words(bundle: Bundle) -> str:
    return "{" + ", ".join(f"{name}: {much:g}" for name, much in bundle.items()) + "}"
