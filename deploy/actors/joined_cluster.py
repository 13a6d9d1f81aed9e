"""A twophase cluster on a Ray cluster that runs already: start it, find it, end it.

The controller is an actor that Ray starts again when it is lost, so a cluster does not depend on
whoever started it. The calling process is a driver of the Ray cluster (`membership`).
"""

from collections.abc import Callable
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import get_placement_group, remove_placement_group

from core.config import ClusterConfig
from core.errors import ConfigError, PeerLost, TwophaseError
from deploy.actors.actor import first_line
from deploy.actors.controller import Controller
from deploy.actors.name import CONTROLLER, NAMESPACE, actor_name
from deploy.actors.node_pool import servers_of
from deploy.actors.place import groups_of
from deploy.live_config import Reload
from deploy.plan import refuse_skewed_clocks
from deploy.supervisor import stop_timeout_s

# start(), config() and stop() may be called while another start() waits.
MAX_CONCURRENCY = 16
ANSWER_S = 60.0


def require_placeable(config: ClusterConfig) -> None:
    """Refuse what says on which cards of a machine workers are, where Ray chooses the machine.

    Raises:
        ConfigError: with the key.
    """
    refuse_skewed_clocks(config)
    for name, pool in (("prefill", config.prefill_pool), ("decode", config.decode)):
        if pool is not None and pool.gpus is not None:
            raise ConfigError(
                f"{name}.gpus", f"Ray chooses nodes and cards: take it out, or use {name}.resources"
            )


def start_cluster(
    cluster: str, config: ClusterConfig, tell: Callable[[str], None] = lambda news: None
) -> str:
    """host:port of the router of the cluster of that name, which is started if it is not there.

    One that runs with another configuration takes this one, if all that differs may change while it
    runs; `tell` is told what changed.

    Raises:
        ConfigError: something else differs, it finds too little room, or is refused.
        TwophaseError: it did not start; nothing of it is left then.
    """
    require_placeable(config)
    controller = _controller_of(cluster) or _new_controller(cluster, config)
    try:
        is_other = _answer(controller.config.remote(), ANSWER_S) != config
    except PeerLost as error:
        ray.kill(controller)
        raise PeerLost(CONTROLLER, f"{error.why}; is twophase installed on every node?") from error
    if is_other:
        reload: Reload = _answer(controller.change.remote(config), None)
        if reload.refusal:
            why = f"{cluster!r} runs with another configuration: `twophase down` ends it"
            raise ConfigError("--name", f"{why}; {reload.refusal}")
        tell(reload.sentence)
    try:
        return str(_answer(controller.start.remote(), None))
    except TwophaseError:
        ray.kill(controller)  # what it started it has stopped
        raise


def stop_cluster(cluster: str) -> int:
    """End the cluster of that name: in order, and by force what is left; how many servers it had.

    Contract: idempotent; may block for the drain of the router and that of the workers.
    """
    servers = servers_of(cluster)
    controller = _controller_of(cluster)
    if controller is not None:
        try:
            own: ClusterConfig = _answer(controller.config.remote(), ANSWER_S)
            _answer(controller.stop.remote(), 2 * stop_timeout_s(own) + ANSWER_S)
        except TwophaseError:
            pass  # it hangs, or is lost: what it kept is ended here
        ray.kill(controller)
    for server in servers_of(cluster):
        ray.kill(ray.get_actor(actor_name(cluster, server), NAMESPACE))
    for group in groups_of(cluster):
        remove_placement_group(get_placement_group(group["name"]))
    return len([server for server in servers if server != CONTROLLER])


def _controller_of(cluster: str) -> Any | None:  # Any: a Ray handle
    try:
        return cast(Any, ray.get_actor(actor_name(cluster, CONTROLLER), NAMESPACE))
    except ValueError:
        return None


def _new_controller(cluster: str, config: ClusterConfig) -> Any:  # Any: a Ray handle
    options = ray.remote(Controller).options(
        name=actor_name(cluster, CONTROLLER),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MAX_CONCURRENCY,
    )
    return cast(Any, options).remote(cluster, config)


def _answer(call: Any, timeout_s: float | None) -> Any:  # Any: what the actor's method returns
    try:
        return ray.get(call, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, TwophaseError):
            raise error.cause from error
        raise PeerLost(CONTROLLER, first_line(error)) from error
    except (RayActorError, GetTimeoutError) as error:
        raise PeerLost(CONTROLLER, first_line(error)) from error
