"""A server in an actor on some node: it listens where the cluster's other nodes reach that node.

That is the address by which Ray itself reaches the node, so it is known to be reachable, whatever
the node's own host name stands for there.
"""

from dataclasses import replace

import ray

from core.settings.security import is_loopback
from deploy.actors.place import living_nodes
from deploy.model_store import fetch_model
from deploy.server import Server, ServerConfig
from router.config import FrontDoorConfig

# Hosts that stand for every address of a machine, of which others have to be told one.
EVERY_ADDRESS = ("0.0.0.0", "[::]", "::")


class NodeServer(Server):
    """One worker or the router, on the node that Ray chose."""

    def __init__(self, config: ServerConfig) -> None:
        self._node_address = node_address()
        super().__init__(at_node(config, self._node_address))

    def start(self) -> str:
        """host:port as other nodes reach it, once the server is up; fetches the model first."""
        fetch_model(self._config.model)
        host, _, port = super().start().rpartition(":")
        return f"{self._node_address if host in EVERY_ADDRESS else host}:{port}"


def node_address() -> str:
    """The address by which Ray reaches the node that this process is on."""
    own = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in living_nodes() if node["NodeID"] == own))


def at_node(config: ServerConfig, address: str) -> ServerConfig:
    """The configuration of a server that listens at a node's address.

    A worker takes a free port; the router keeps `router.host` if it is not loopback.
    """
    if not isinstance(config, FrontDoorConfig):
        return replace(config, listen=f"{address}:0")
    if not is_loopback(config.listen):
        return config
    return replace(config, router=config.router.model_copy(update={"host": address}))
