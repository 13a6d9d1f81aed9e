"""The KV links out of one worker: found by the incarnation of the decode worker they lead to.

Runs in the event loop; building a sender blocks, so it happens in a thread.
"""

import asyncio
from dataclasses import dataclass

from core.clock import Clock
from core.config import TransferConfig
from core.errors import LayoutMismatch, Overloaded, PeerLost, TransferFailed, TransferFailure
from core.layout import KVLayout
from core.link import LinkOpened, LinkRefused, OpenLink
from core.request import Request, WorkerName
from core.settings.chaos import ChaosConfig
from core.tally import Tally
from core.worker import LinkStatus, RemoteReservation
from engine.kv_cache import TORCH_DTYPES, KVCache
from kv_link.bad_link import BadSender
from kv_link.counts import LinkCounts
from kv_link.link import Handoff, Link, LinkLoad, Way
from kv_transfer.backend import BackendKind, Offer, Sender
from kv_transfer.connection import connect, local_endpoint
from kv_transfer.converting import ConvertingSender
from kv_transfer.outbound import OutboundTransfer
from kv_transfer.pages import view_as_pages
from kv_transfer.plan import Reservation
from kv_transfer.reshape import CacheShape, Reshape, require_reshapable
from twophase.credentials import Credentials
from twophase.peer import Peer

SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is to a decode worker."""

    name: WorkerName
    incarnation: str
    layout: KVLayout


class LinkPool:
    """Links made on demand; use as an async context manager."""

    def __init__(
        self,
        identity: Identity,
        cache: KVCache,
        config: TransferConfig,
        clock: Clock,
        *,
        credentials: Credentials = Credentials(),
        chaos: ChaosConfig = ChaosConfig(),
    ) -> None:
        self.tally = Tally()
        self._identity = identity
        self._cache = cache
        self._config = config
        self._clock = clock
        self._credentials = credentials
        self._chaos = chaos
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._num_opening = 0
        self._num_closed_bytes = 0
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> "LinkPool":
        """The pool, with no link."""
        await self._group.__aenter__()
        self._sweeper = self._group.create_task(self._sweep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every link."""
        self._sweeper.cancel()
        for link in self._links.values():
            link.close()
        await self._group.__aexit__(None, None, None)

    @property
    def statuses(self) -> tuple[LinkStatus, ...]:
        """What an operator sees of each link."""
        return tuple(link.status for link in self._links.values())

    def loads(self, now_s: float) -> list[LinkLoad]:
        """What each link carries."""
        return [link.load(now_s) for link in self._links.values()]

    @property
    def num_open_transfers(self) -> int:
        """Handoffs that have not ended."""
        return sum(link.num_open_transfers for link in self._links.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of sealed handoffs on all links so far."""
        return self._num_closed_bytes + sum(link.num_bytes for link in self._links.values())

    async def begin(self, request: Request, reservation: RemoteReservation) -> Handoff:
        """Start the handoff of one request, on a new link if there is none.

        Raises:
            LayoutMismatch, ConfigError, PeerLost, TransferFailed: there can be no link, or decode
                reserved for another prompt.
        """
        _require_same_prompt(request, reservation)
        link = await self._get(reservation)
        transfer = OutboundTransfer(
            Reservation(
                request_id=request.request_id,
                epoch=reservation.epoch,
                block_ids=reservation.block_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_blocks=reservation.num_shared_blocks,
            ),
            layout=link.layout,
            source_layout=self._identity.layout,
            backend=link.status.backend,
            sizes=link.piece_sizes(self._config.piece),
            deadline_s=request.deadline_s,
        )
        return link.begin(transfer)

    async def _get(self, reservation: RemoteReservation) -> Link:
        incarnation = reservation.decode_incarnation
        async with self._opening.setdefault(incarnation, asyncio.Lock()):
            link = self._links.get(incarnation)
            if link is None or not link.is_usable:
                self._make_room()
                self._num_opening += 1
                try:
                    link = await self._open(reservation)
                finally:
                    self._num_opening -= 1
                self._links[incarnation] = link
            return link

    def _make_room(self) -> None:
        """Close the link that was idle longest if there are as many as may be.

        Raises:
            Overloaded: none is idle.
        """
        usable = [link for link in self._links.values() if link.is_usable]
        if len(usable) + self._num_opening < self._config.max_links:
            return
        idle = [link for link in usable if link.num_open_transfers == 0]
        if not idle:
            raise Overloaded(f"all {self._config.max_links} links of this worker are in use")
        min(idle, key=lambda link: link.last_used_s).close()

    async def _sweep(self) -> None:
        """Let deadlines pass, and close links that carried nothing for long; never returns."""
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest_s = self._clock.now_s() - self._config.idle_timeout_s
            for link in self._links.values():
                link.tick()
                if link.num_open_transfers == 0 and link.last_used_s < oldest_s:
                    link.close()

    async def _open(self, reservation: RemoteReservation) -> Link:
        peer = Peer(reservation.decode_address, self._clock, self._credentials)
        stream = peer.link()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                stream.send(self._open_message(reservation))
                messages = aiter(stream)
                opened = await anext(messages, None)
                if isinstance(opened, LinkRefused):
                    raise opened.error
                if not isinstance(opened, LinkOpened):
                    raise PeerLost(reservation.decode_worker, "it ended the link at once")
                reshape = self._reshape(opened)
                sender = await _wanted(
                    asyncio.get_running_loop().run_in_executor(None, self._connect, opened, reshape)
                )
                _require_room_for_a_block(sender, opened)
        except BaseException as error:
            stream.close()
            await peer.close()
            if isinstance(error, TimeoutError):
                detail = f"no link to {reservation.decode_worker} within its time"
                raise TransferFailed(TransferFailure.LINK_LOST, detail) from error
            raise
        link = Link(
            opened,
            Way(sender, reshape, LinkCounts(self.tally, reservation.decode_worker, opened.kind)),
            stream,
            messages,
            peer_name=reservation.decode_worker,
            clock=self._clock,
        )
        self._group.create_task(self._keep(link, peer, reservation.decode_incarnation))
        return link

    def _reshape(self, opened: LinkOpened) -> Reshape:
        require_reshapable(
            self._identity.layout, opened.layout, may_convert_dtype=self._config.convert_dtype
        )
        return Reshape(
            CacheShape(self._identity.layout, self._cache.num_blocks),
            CacheShape(opened.layout, opened.num_blocks),
        )

    def _connect(self, opened: LinkOpened, reshape: Reshape) -> Sender:
        sender = self._sender(opened, reshape)
        if not self._chaos.is_link_bad:
            return sender
        layout = self._identity.layout
        page_bytes = layout.rank_page_bytes // reshape.page.num_per_block(layout)
        return BadSender(sender, self._chaos, page_bytes=page_bytes)

    def _sender(self, opened: LinkOpened, reshape: Reshape) -> Sender:
        offer, timeout_s = (
            Offer(opened.kind, dict(opened.parameters)),
            self._config.connect_timeout_s,
        )
        num_pages = reshape.page.num_per_block(self._identity.layout)
        pages = view_as_pages(self._cache.kv_L2NSKD, num_pages)
        if opened.layout.dtype is self._identity.layout.dtype:
            return connect(offer, pages, timeout_s)
        return ConvertingSender(
            pages,
            TORCH_DTYPES[opened.layout.dtype],
            num_block_pages=reshape.num_block_pages,
            connect=lambda converted: connect(offer, converted, timeout_s),
        )

    async def _keep(self, link: Link, peer: Peer, incarnation: str) -> None:
        try:
            await link.run()
        finally:
            self._num_closed_bytes += link.num_bytes
            if self._links.get(incarnation) is link:
                del self._links[incarnation]
            if incarnation in self._opening and not self._opening[incarnation].locked():
                del self._opening[incarnation]
            await peer.close()

    def _open_message(self, reservation: RemoteReservation) -> OpenLink:
        here = local_endpoint(self._cache.kv_L2NSKD)
        return OpenLink(
            prefill_worker=self._identity.name,
            incarnation=self._identity.incarnation,
            decode_incarnation=reservation.decode_incarnation,
            layout=self._identity.layout,
            backend=self._config.backend,
            host_id=here.host_id,
            device=here.device,
            has_nixl=here.has_nixl,
            has_rdma=here.has_rdma,
            card=here.card,
            reachable_cards=here.reachable_cards,
        )


async def _wanted(building: asyncio.Future[Sender]) -> Sender:
    """The sender that a thread builds; one that comes when nobody waits any more is closed."""
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        building.add_done_callback(_close_sender)
        raise


def _close_sender(built: asyncio.Future[Sender]) -> None:
    if not built.cancelled() and built.exception() is None:
        built.result().close()


def _require_room_for_a_block(sender: Sender, opened: LinkOpened) -> None:
    """Refuse blocks of which one layer does not fit into a staging buffer: it is not cut further.

    Buffers are made for pages, which are smaller than blocks where the shapes differ.
    """
    num_bytes = 2 * opened.layout.page_bytes
    if opened.kind == BackendKind.TORCH and num_bytes > sender.max_piece_bytes:
        largest = sender.max_piece_bytes
        sender.close()
        raise LayoutMismatch(
            f"one layer of a block takes {num_bytes} bytes, {opened.kind} stages {largest} where "
            f"shapes differ ({opened.layout})"
        )


def _require_same_prompt(request: Request, reservation: RemoteReservation) -> None:
    """Refuse a KV cache that decode would take for that of another prompt of as many blocks."""
    if request.prompt_digest != reservation.prompt_digest:
        raise TransferFailed(
            TransferFailure.REFUSED,
            f"the prompt of {request.num_prompt_tokens} tokens is not the one for which "
            f"{reservation.decode_worker} reserved blocks",
        )
