"""The pool controller: an actor that keeps one cluster's workers and router.

    1 it looks which of the cluster's actors live (`reconciliation`): none at the first start
    2 it adopts those, starts what is missing, all side by side, and stops what is too many
    3 it starts the router, or adopts it, and tells it where the workers are
    4 it keeps them: lost ones are started again, pools scale (`supervisor`, `scaler`)
    5 `stop` ends the router, then the workers, in order

If the first start fails, everything is taken down and `start` tells why. Later nothing is: if the
controller is lost, or finds that it cannot go on, its process ends, Ray starts another one, and
that begins with 1. The servers do not notice: they are actors of their own.
"""

import logging
import os
import threading
from concurrent.futures import Future
from contextlib import ExitStack

from core.config import ClusterConfig
from core.process import start_logging
from core.settings.router import RouterConfig
from core.worker import Role
from deploy.actors.kept_config import forget, keep, kept
from deploy.actors.node_choice import require_room
from deploy.actors.node_pool import NodePool, asks_for_nodes
from deploy.actors.place import free_nodes
from deploy.actors.reconciliation import Reconciliation, reconcile, sizes_of
from deploy.live_config import LiveConfig, Reload
from deploy.own_client import own_client, wait_until_ready
from deploy.scaler import Scaler
from deploy.supervisor import Slot, Supervisor, stop_timeout_s, stop_together

READY_TIMEOUT_S = 120.0
LOOK_S = 1.0
# Between two tries of a controller that cannot go on; Ray has no wait of its own.
AGAIN_S = 2.0

_log = logging.getLogger("twophase.deploy")


class Controller:
    """Runs a cluster in a thread of its own from when it is made; every method is for Ray calls."""

    def __init__(self, cluster: str, config: ClusterConfig) -> None:
        start_logging()
        self._cluster = cluster
        self._live = LiveConfig(kept() or config)
        self._changing = threading.Lock()
        self._address: Future[str] = Future()
        self._must_stop = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def start(self) -> str:
        """host:port of the router, once a token went through both pools.

        Raises:
            TwophaseError: the cluster cannot start; nothing of it is left running then.

        Contract: idempotent; may block for the time that loading the model takes.
        """
        return self._address.result()

    def config(self) -> ClusterConfig:
        """What is in force: what the cluster was started with, or what it was changed to since."""
        return self._live.current

    def change(self, config: ClusterConfig) -> Reload:
        """Take another configuration, if all that differs may change now.

        Contract: idempotent; may block until the cluster has started.
        """
        address = self._address.result()

        def tell(router: RouterConfig) -> None:
            with own_client(address, config.security) as client:
                client.admin.reconfigure(router)

        with self._changing:
            reload = self._live.reload(lambda: config, tell)
            keep(self._live.current)
        _log.info("%s", reload.sentence)
        return reload

    def stop(self) -> None:
        """Stop router and workers in order; returns when they have ended. Contract: idempotent."""
        self._must_stop.set()
        self._ended.wait(2 * stop_timeout_s(self._live.current))
        forget()

    def _run(self) -> None:
        failure = None
        with ExitStack() as stack:
            is_new = False
            try:
                pool = NodePool(self._cluster, self._live)
                is_new = not pool.living()
                self._serve(pool, stack, is_new=is_new)
            except BaseException as error:  # root of the thread
                if not is_new or self._address.done():
                    _log.exception("this controller ends, and another goes on")
                    self._must_stop.wait(AGAIN_S)
                    os._exit(1)
                failure = error
        if failure is not None:
            self._address.set_exception(failure)
        self._ended.set()

    def _serve(self, pool: NodePool, stack: ExitStack, *, is_new: bool) -> None:
        config = self._live.current
        limit_s = stop_timeout_s(config)
        if is_new and not asks_for_nodes(config):
            require_room(config, free_nodes())
        living = pool.living()
        pool.places.sweep(living)
        plan = reconcile(sizes_of(config), living, is_new=is_new)
        slots = self._slots(pool, plan, stack)
        if is_new:
            for slot in slots:
                slot.wait_until_up()
        router = pool.router(lambda: [slot.address for slot in slots if slot.address])
        stack.callback(stop_together, [router], limit_s)
        router.wait_until_up()
        router.keep()
        self._keep(pool, slots, router, stack)
        if is_new:
            wait_until_ready(router.address, config.security, READY_TIMEOUT_S)
        address = router.address
        self._address.set_result(address)
        while not self._must_stop.wait(LOOK_S):
            if router.address != address:
                raise RuntimeError(f"the router is at {router.address} now, not at {address}")

    def _slots(self, pool: NodePool, plan: Reconciliation, stack: ExitStack) -> list[Slot]:
        """The workers that are kept, in slots that stop with `stack`; the others stop now."""
        slots: list[Slot] = []
        limit_s = stop_timeout_s(self._live.current)
        stack.callback(stop_together, slots, limit_s)
        for name in (*plan.adopted, *plan.started):
            slots.append(_slot(pool, name))
        surplus = [_slot(pool, name) for name in plan.stopped]
        for slot in surplus:
            _log.warning("%s is one too many, and stops", slot.name)
            stopping = threading.Thread(target=_stop_adopted, args=(slot, limit_s), daemon=True)
            stopping.start()
        return slots

    def _keep(self, pool: NodePool, slots: list[Slot], router: Slot, stack: ExitStack) -> None:
        config = self._live.current
        supervisor = Supervisor(slots, tells_router=True)
        stack.callback(supervisor.close)  # before anything is stopped
        supervisor.watch(router.address, config.security)
        if config.scaling is not None:
            may_end = threading.Event()
            stack.callback(may_end.set)

            def create(role: Role, index: int, address: str | None) -> Slot:
                return pool.worker(role, index)

            scaler = Scaler(self._live, slots, create, supervisor, may_end)
            stack.callback(scaler.close)
            scaler.watch(router.address)


def _slot(pool: NodePool, name: str) -> Slot:
    kind, _, index = name.rpartition("-")
    return pool.worker(Role(kind), int(index))


def _stop_adopted(slot: Slot, timeout_s: float) -> None:
    slot.replica.stop(timeout_s)
