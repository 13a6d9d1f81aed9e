"""Transfer by one-sided writes over nixl and UCX: InfiniBand, RoCE, CUDA IPC, shared memory, TCP.

Prefill's agent writes pages of its cache straight into decode's registered cache; decode's thread
only hashes them where they lie. Each end has one nixl agent per link, under a name that is never
used twice. Decode's metadata travels in the offer; of the sender decode needs nothing but its
`lifeline`. Registering a cache once per link is the price of the fence below.

1. `offer` makes an agent, registers the cache, listens for the lifeline.
2. `connect` ties the lifeline first, then makes its own agent and loads decode's metadata.
3. `send` hashes the source, starts the write and waits until UCX says that it lies in the target.
4. `take` hashes the target.

**What fences a writer.** nixl cannot abort: releasing a request that is under way leaves its
writes under way (nixl issue 2067, pull request 2044), so `send` waits and nothing is released
early. Nor does deregistering suffice: UCX keeps the registration in its cache until the context
dies (UCX issue 9259), and over TCP the receiving worker writes to any address that it is told
(uct/tcp/tcp_ep.c). So a closed receiver destroys its whole agent. What that proves depends on
whose hands the bytes were in:

- TCP, and whatever UCX emulates: decode's own worker wrote them, and it is gone. Proven.
- InfiniBand, RoCE: queue pairs and memory regions are destroyed, after which a device refuses
  what still arrives. Assumed of the hardware; not run where this was written.
- CMA (process_vm_writev), XPMEM, CUDA IPC: the sender's process writes by itself, on this kernel,
  and no key stops it. Hence the lifeline: only its goodbye, said after its last write ended and
  its agent was destroyed, or the death of its process is taken as proof. For CUDA IPC a dead
  process is assumed to have no copy left in a queue of the GPU.

UCX over TCP trusts whoever can reach its port: keep it on a private network. The CUDA path (VRAM
descriptors, checksums on the device) shares this code and was not run where it was written; there
decode's hash also assumes that a completed write is visible to its kernels.
"""

import base64
import threading
import time
from collections.abc import Sequence

import torch

from core.errors import ConfigError, PeerLost
from core.link import PieceId, Span
from kv_transfer.backend import BackendKind, Offer
from kv_transfer.cuda.device_pages import Pages, pages_of
from kv_transfer.cuda.lane import Lane
from kv_transfer.lifeline import Lifeline, LifelineServer
from kv_transfer.nixl.agent import Agent, Transfer, load
from kv_transfer.nixl.descriptors import PageTable, runs_of
from kv_transfer.patience import is_done_within

MAX_PIECE_BYTES = 4 * 1024 * 1024
WRITE_TIMEOUT_S = 10.0
END_THREAD = "nixl-end"
END_SLEEP_S = 10e-3


class NixlBackend:
    """Makes links into the decode worker's cache."""

    kind = BackendKind.NIXL.value

    def __init__(self, *, host: str) -> None:
        """Load nixl, which takes half a second, so that no link has to.

        Raises:
            ConfigError: it is not installed, or UCX does not start.
        """
        load()
        Agent(torch.zeros(4096, dtype=torch.uint8)).close()
        self._host = host
        self._receivers: list[NixlReceiver] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed ordinary memory; any other memory can be registered as well."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def offer(self, link_id: str, cache_L2NSKD: torch.Tensor) -> tuple[Offer, "NixlReceiver"]:
        """A new link into `cache_L2NSKD`; takes some 50 ms for the agent."""
        with Lane(cache_L2NSKD.device).working():  # UCX takes the current card's context
            agent = Agent(cache_L2NSKD)
        lifeline = LifelineServer(self._host)
        parameters = {
            "metadata": base64.b64encode(agent.metadata).decode("ascii"),
            "address": str(cache_L2NSKD.data_ptr()),
            "num_blocks": str(cache_L2NSKD.shape[2]),
            "memory_kind": agent.memory_kind,
            "device_id": str(agent.device_id),
            **lifeline.parameters,
        }
        receiver = NixlReceiver(link_id, agent, lifeline, cache_L2NSKD)
        self._receivers = [r for r in self._receivers if not r.is_writer_gone()]
        self._receivers.append(receiver)
        return Offer(self.kind, parameters), receiver

    def close(self) -> None:
        """Destroy every link's agent and forget its lifeline."""
        for receiver in self._receivers:
            receiver.discard()
        self._receivers.clear()


class NixlReceiver:
    """Decode's end of a link: the agent that serves it, and the lifeline of its writer."""

    def __init__(
        self, link_id: str, agent: Agent, lifeline: LifelineServer, cache_L2NSKD: torch.Tensor
    ) -> None:
        self._link_id = link_id
        self._agent = agent
        self._lifeline = lifeline
        self._lane = Lane(cache_L2NSKD.device)
        self._pages: Pages | None = pages_of(cache_L2NSKD)
        self._has_no_agent = False

    def accept(self, timeout_s: float) -> None:
        """Wait for the sender's lifeline and for its word that it is built."""
        try:
            self._lifeline.accept(timeout_s)
        except OSError as error:
            raise PeerLost(self._link_id, f"no sender was built: {error}") from error

    def take(self, span: Span, target_block_ids: Sequence[int] | None) -> int:
        """Checksum of the piece where it already lies; 0 if it is to be thrown away."""
        pages = self._pages
        if pages is None:
            raise PeerLost(self._link_id, "the link is closed")
        with self._lane.working():
            return 0 if target_block_ids is None else pages.checksum(span, target_block_ids)

    def is_writer_gone(self) -> bool:
        """True once the agent is destroyed and the sender is gone; see the module's docstring."""
        return self._has_no_agent and self._lifeline.is_writer_gone()

    def close(self) -> None:
        """Destroy the agent; the lifeline stays until the sender is proven gone."""
        self._pages = None
        self._lifeline.close()
        self._agent.close()
        self._has_no_agent = True

    def discard(self) -> None:
        """Close all, proof or not: this process is about to give up the cache itself."""
        self.close()
        self._lifeline.discard()


class NixlSender:
    """Prefill's end of a link.

    Invariant: the lifeline says goodbye only after the agent was destroyed with no write of its
    own under way.
    """

    def __init__(self, offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> None:
        load()
        parameters = offer.parameters
        self._lane = Lane(cache_L2NSKD.device)
        self._pages = pages_of(cache_L2NSKD)
        self._peer = parameters["lifeline_host"]
        self._lock = threading.Lock()
        self._is_closed = False
        self._transfer: Transfer | None = None
        try:
            self._lifeline = Lifeline(parameters, timeout_s)
        except OSError as error:
            raise PeerLost(self._peer, f"it did not let the link in: {error}") from error
        self._agent: Agent | None = None
        try:
            with self._lane.working():
                self._agent = agent = Agent(cache_L2NSKD)
            self._peer_agent = agent.join(base64.b64decode(parameters["metadata"]))
            self._lifeline.say_built()
        except (ConfigError, PeerLost):
            self.close()
            raise
        except OSError as error:
            self.close()
            raise PeerLost(self._peer, f"it went away: {error}") from error
        self._memory_kind = parameters["memory_kind"]
        page_bytes = cache_L2NSKD[0, 0, 0].nbytes
        self._source = PageTable(
            cache_L2NSKD.data_ptr(), page_bytes, cache_L2NSKD.shape[2], agent.device_id
        )
        self._target = PageTable(
            int(parameters["address"]),
            page_bytes,
            int(parameters["num_blocks"]),
            int(parameters["device_id"]),
        )

    @property
    def max_piece_bytes(self) -> int:
        """Small enough that decode checks a piece while the next is written."""
        return MAX_PIECE_BYTES

    def has_room(self) -> bool:
        """Always: there is no staging."""
        return True

    def send(
        self,
        piece_id: PieceId,
        span: Span,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> int:
        """Write the piece into decode's cache; the checksum of its bytes.

        After a write that found no end in WRITE_TIMEOUT_S the source may be read, and the target
        be written, for as long as the sender has not said goodbye: decode's quarantine holds.
        """
        with self._lock:
            if self._is_closed or self._agent is None or self._lifeline.has_ended():
                raise PeerLost(self._peer, f"the link was closed before {piece_id}")
            runs = runs_of(source_block_ids, target_block_ids)
            with self._lane.working():
                # First: on a card this also waits for what this thread has put into the source.
                checksum = self._pages.checksum(span, source_block_ids)
                self._transfer = self._agent.start_write(
                    self._source.rows(span, runs.sources, runs.lengths),
                    self._target.rows(span, runs.targets, runs.lengths),
                    peer=self._peer_agent,
                    memory_kind=self._memory_kind,
                )
            self._wait(self._transfer, piece_id)
            return checksum

    def acknowledge(self, piece_id: PieceId) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Destroy the agent, then say goodbye: now, or as soon as the write under way is over."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._try_end():
            threading.Thread(target=self._end, name=END_THREAD, daemon=True).start()

    def _wait(self, transfer: Transfer, piece_id: PieceId) -> None:
        if not is_done_within(transfer.poll, WRITE_TIMEOUT_S):
            raise PeerLost(self._peer, f"{piece_id} did not arrive in {WRITE_TIMEOUT_S} s")
        if transfer.failure is not None:
            raise transfer.failure

    def _try_end(self) -> bool:
        """End the link unless a write is under way; True if it has ended."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._transfer is not None and not self._transfer.is_over:
                return False
            if self._agent is not None:
                self._agent.close()
            self._lifeline.close()
        finally:
            self._lock.release()
        return True

    def _end(self) -> None:
        """Wait for the write under way, however long it takes: until then decode's blocks rest."""
        while True:
            with self._lock:
                if self._transfer is not None:
                    self._transfer.poll()
            if self._try_end():
                return
            time.sleep(END_SLEEP_S)


def connect(offer: Offer, cache_L2NSKD: torch.Tensor, timeout_s: float) -> NixlSender:
    """The sender's end of the link that `offer` describes.

    Raises:
        PeerLost: decode did not let it in within `timeout_s`, or nixl cannot reach it.
        ConfigError: nixl is not installed here, or UCX does not start.
    """
    return NixlSender(offer, cache_L2NSKD, timeout_s)
