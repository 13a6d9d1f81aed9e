"""A cluster's configuration as it was changed last, in the table that Ray's head keeps.

Ray makes a lost controller again with what the first one was made with. What was changed since must
not come undone, so a controller keeps it under its own id, which it has until the cluster ends.
"""

import ray
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_put,
)

from core.config import ClusterConfig
from deploy.actors.name import NAMESPACE


def keep(config: ClusterConfig) -> None:
    """The calling actor's configuration is this one from now on."""
    _internal_kv_put(_key(), config.model_dump_json(), overwrite=True, namespace=NAMESPACE)


def kept() -> ClusterConfig | None:
    """What the calling actor, or the lost one that it follows, kept last."""
    found = _internal_kv_get(_key(), namespace=NAMESPACE)
    return None if found is None else ClusterConfig.model_validate_json(found)


def forget() -> None:
    """The calling actor ends for good."""
    _internal_kv_del(_key(), namespace=NAMESPACE)


def _key() -> str:
    return f"twophase config {ray.get_runtime_context().get_actor_id()}"
