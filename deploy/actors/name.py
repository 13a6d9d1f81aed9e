"""Names by which a cluster's actors and placement groups are found again, whoever started them.

twophase:<cluster>:<worker>     twophase:main:decode-0, twophase:main:router
twophase:<cluster>:controller
"""

import re

from core.errors import ConfigError

# Ray's namespace: actors and placement groups of other programs have theirs.
NAMESPACE = "twophase"
CONTROLLER = "controller"
ROUTER = "router"

_CLUSTER = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def require_cluster_name(cluster: str) -> None:
    """Refuse what cannot be told from the rest of an actor's name; raises ConfigError."""
    if not _CLUSTER.fullmatch(cluster):
        raise ConfigError(
            "--name", f"is {cluster!r}: 1 to 63 lower-case letters, digits and hyphens are taken"
        )


def actor_name(cluster: str, server: str) -> str:
    """The name of a server's actor, and of its placement group."""
    return f"twophase:{cluster}:{server}"


def server_of_name(cluster: str, name: str) -> str | None:
    """The server whose actor has that name; None if it is none of the cluster."""
    prefix = actor_name(cluster, "")
    return name.removeprefix(prefix) if name.startswith(prefix) else None
