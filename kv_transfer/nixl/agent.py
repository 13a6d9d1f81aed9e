"""One nixl agent over UCX, as little of it as a link needs, with types.

nixl is optional (`pip install twophase[rdma]`) and imported here alone, on first use. Its Python
class fixes the progress thread's delay to zero, which keeps a core busy (measured 2026-11-30: 0.94
of a core for one idle agent); the classes beneath it, which nixl exports as well, do not: with a
delay of 10 ms the thread sleeps in poll, wakes at once for traffic, and costs 0.007 of a core.

An agent belongs to one link, so that destroying it ends everything that can reach memory through
it: that is what the fence of `backend` is built on.
"""

import importlib
import importlib.util
import uuid
from types import ModuleType
from typing import Any

import torch

from core.errors import ConfigError, PeerLost
from kv_transfer.nixl.descriptors import Descriptors

PROGRESS_DELAY_US = 10_000
INSTALL_HINT = "nixl is not installed: pip install twophase[rdma]"


def is_installed() -> bool:
    """True if the extra `rdma` is there; does not import it."""
    return importlib.util.find_spec("nixl") is not None


def load() -> ModuleType:
    """The nixl package.

    Raises:
        ConfigError: it is not installed, or cannot be loaded.
    """
    if not is_installed():
        raise ConfigError("transfer.backend", INSTALL_HINT)
    try:
        return importlib.import_module("nixl")
    except ImportError as error:
        raise ConfigError("transfer.backend", f"nixl cannot be loaded: {error}") from error


class Agent:
    """A nixl agent with a name of its own and one registered cache.

    Thread-safe. Invariant: after `close` neither this process nor its network devices serve any
    request that was made with the agent's metadata.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self._nixl = nixl = load()
        is_host = cache.device.type == "cpu"
        self.memory_kind = "DRAM" if is_host else "VRAM"
        self.device_id = 0 if is_host else cache.device.index
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        self.name = f"twophase-{uuid.uuid4().hex}"
        self._agent: Any = nixl.nixlAgent(self.name, config)  # a class of nixl's C++ module
        try:
            self._agent.createBackend("UCX", {})
            region = (cache.data_ptr(), cache.nbytes, self.device_id, "")
            self._agent.registerMem(nixl.nixlRegDList(self._segment(self.memory_kind), [region]))
        except _errors(nixl) as error:
            problem = f"nixl cannot use UCX here ({error}); UCX_TLS, if set, must name tcp"
            raise ConfigError("transfer.backend", problem) from error
        self._cache = cache  # registered memory has to outlive the registration

    @property
    def metadata(self) -> bytes:
        """What another agent needs to reach the registered cache."""
        return bytes(self._agent.getLocalMD())

    def join(self, metadata: bytes) -> str:
        """Load another agent's metadata and start connecting to it; its name.

        Raises:
            PeerLost: the metadata cannot be used here.
        """
        try:
            name = bytes(self._agent.loadRemoteMD(metadata)).decode()
            self._agent.makeConnection(name, [])
        except _errors(self._nixl) as error:
            raise PeerLost("decode", f"nixl cannot reach it: {error}") from error
        return name

    def start_write(
        self, source: Descriptors, target: Descriptors, *, peer: str, memory_kind: str
    ) -> "Transfer":
        """Begin to write rows (address, bytes, device) into the peer's, in order.

        Raises:
            PeerLost: the peer is known to be gone; nothing is under way.
        """
        nixl, agent = self._nixl, self._agent
        try:
            handle = agent.createXferReq(
                nixl.NIXL_WRITE,
                nixl.nixlXferDList(self._segment(self.memory_kind), source),
                nixl.nixlXferDList(self._segment(memory_kind), target),
                peer,
            )
        except _errors(nixl) as error:
            raise PeerLost(peer, f"nixl cannot write to it: {error}") from error
        return Transfer(nixl, agent, handle, peer)

    def close(self) -> None:
        """Destroy the agent: endpoints, connections, registrations.

        Contract: idempotent; may block some 10 ms; no transfer of it may be in flight.
        """
        self._agent = None

    def _segment(self, memory_kind: str) -> Any:  # an enum of nixl's C++ module
        return getattr(self._nixl, f"{memory_kind}_SEG")


class Transfer:
    """One write under way.

    Invariant: once it `is_over` without `failure`, nothing reads the source or writes the target
    for it. After a failure UCX has ended all requests of the endpoint; what its device may still
    do ends with the agent.
    """

    def __init__(self, nixl: ModuleType, agent: Any, handle: int, peer: str) -> None:
        self._nixl = nixl
        self._agent = agent
        self._handle = handle
        self._peer = peer
        self.failure: PeerLost | None = None
        self.is_over = False
        self._update(agent.postXferReq)

    def poll(self) -> bool:
        """`is_over`, brought up to date; `failure` says whether it ended well.

        After a failure some of the bytes may have arrived.
        """
        if not self.is_over:
            self._update(self._agent.getXferStatus)
        return self.is_over

    def _update(self, ask: Any) -> None:  # a bound method of nixl's C++ agent
        try:
            if ask(self._handle) == self._nixl.NIXL_IN_PROG:
                return
        except _errors(self._nixl) as error:
            self.failure = PeerLost(self._peer, f"the write failed: {error}")
        self.is_over = True
        self._agent.releaseXferReq(self._handle)
        self._agent = None


def _errors(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """What nixl raises when a peer or a transport fails; they share no base class."""
    return (
        nixl.nixlBackendError,
        nixl.nixlCancelledError,
        nixl.nixlInvalidParamError,
        nixl.nixlMismatchError,
        nixl.nixlNotAllowedError,
        nixl.nixlNotFoundError,
        nixl.nixlNotSupportedError,
        nixl.nixlRemoteDisconnectError,
        nixl.nixlUnknownError,
    )
