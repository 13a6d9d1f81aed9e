"""What the router knows of its workers beyond their own words: facts for placement and admission.

    ledger         what was given to them and is not done      rates   how fast they were lately
    demand         what is asked for
    prefix_index   which prompts they probably have cached     sessions   who served whom last

Pure: facts and times in, facts out.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from core.request import Request
from core.timeline import PrefillReport, TransferReport
from core.worker import FirstToken, NewToken
from router.answer import Event
from router.placing.admission import Backlog
from router.placing.demand import DemandMeter
from router.placing.fairness import Ticket
from router.placing.ledger import Ledger, Work
from router.placing.load import (
    REQUESTS_PER_SLOT,
    DecodeLoad,
    Loads,
    Need,
    PrefillLoad,
    is_soon,
)
from router.placing.placement import Placement, Reason, Rejected
from router.placing.prefix_index import PrefixIndex, PromptBlocks
from router.placing.rates import Rates
from router.placing.shortlist import FEW, Shortlist

MAX_SESSIONS = 4096


Decide = Callable[[Loads], Placement | Rejected]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as placement knows it; holder is a worker that is to be looked at by all means."""

    prompt: PromptBlocks
    session: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at its workers; work None is a probe, which is neither load nor measured."""

    placement: Placement
    num_prompt_tokens: int = 0
    work: Work | None = None


class Knowledge:
    """All of that.

    Invariant: once every lease has ended, no worker has anything to do.
    """

    def __init__(self, now_s: float) -> None:
        self.demand = DemandMeter(now_s)
        self.ledger = Ledger()
        self.rates = Rates()
        self._index = PrefixIndex()
        self._shortlist = Shortlist()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def place(
        self, decide: Decide, loads: Loads, asked: Asked
    ) -> tuple[Placement | Rejected, Loads]:
        """What `decide` says of `loads` as they are for this prompt, and those that it said it of.

        In large pools it sees a short list first, then, if that will not do, everyone who may.
        """
        served = self._sessions.get(asked.session, "") if asked.session else ""
        wanted = {*self._holders(loads, asked.prompt), served, asked.holder} - {""}
        shown = Loads(
            self._shortlist.of(loads.prefill, wanted), self._shortlist.of(loads.decode, wanted)
        )
        seen = self._seen(shown, asked.prompt, served)
        outcome = decide(seen)
        is_all = shown.prefill is loads.prefill and shown.decode is loads.decode
        if is_all or isinstance(outcome, Placement):
            return outcome, seen
        others = self._roomy(loads) if outcome.reason is Reason.FULL else loads
        if not others.decode or (loads.prefill and not others.prefill):
            return outcome, seen
        seen = self._seen(others, asked.prompt, served)
        return decide(seen), seen

    def _seen(self, loads: Loads, prompt: PromptBlocks, served: str) -> Loads:
        return Loads(
            [self._prefill(load, prompt) for load in loads.prefill],
            [self._decode(load, prompt, served) for load in loads.decode],
        )

    def _holders(self, loads: Loads, prompt: PromptBlocks) -> set[str]:
        """Workers that were sent most of the prompt; nobody where all are looked at anyway."""
        if max(len(loads.prefill), len(loads.decode)) <= FEW:
            return set()
        sizes = {load.layout.block_size for load in loads.prefill[:1]}
        sizes |= {load.layout.block_size for load in loads.decode[:1]}
        return {name for size in sizes for name in self._index.holders(prompt, size)}

    def _roomy(self, loads: Loads) -> Loads:
        """Those of `loads` that by numbers of requests alone have room."""
        ledger, rates = self.ledger, self.rates

        def is_reading_little(load: PrefillLoad) -> bool:
            name = load.incarnation
            num_tokens, speed = ledger.num_prompt_tokens(name), rates.prefill_tokens_per_s(name)
            return is_soon(ledger.num_prompts(name), num_tokens, speed)

        def has_slot(load: DecodeLoad) -> bool:
            most = REQUESTS_PER_SLOT * load.max_num_sequences
            return ledger.num_sequences(load.incarnation) < most

        return Loads(
            [load for load in loads.prefill if is_reading_little(load)],
            [load for load in loads.decode if has_slot(load)],
        )

    def begin(
        self, placement: Placement, need: Need, prompt: PromptBlocks, loads: Loads, session: str
    ) -> Lease:
        """The request was placed; `loads` are those that the decision saw. Ended by `end`."""
        decode = next(d for d in loads.decode if d.incarnation == placement.decode_incarnation)
        # One that ships what it holds is no reader: it stops, and reads nothing.
        reader: PrefillLoad | DecodeLoad = next(
            (p for p in loads.prefill if p.incarnation == placement.prefill_incarnation), decode
        )
        num_to_read = need.num_prompt_tokens - reader.num_cached_tokens
        num_bytes = 0
        if placement.prefill is not None:
            num_cached_blocks = decode.num_cached_tokens // decode.layout.block_size
            num_blocks = decode.layout.num_blocks(need.num_prompt_tokens) - num_cached_blocks
            num_bytes = num_blocks * decode.layout.block_bytes
        work = Work(
            reader=placement.prefill_incarnation or reader.incarnation,
            decode=decode.incarnation,
            num_prompt_tokens=num_to_read if placement.held_id is None else 0,
            num_kv_tokens=need.num_tokens - decode.num_cached_tokens,
            num_bytes=num_bytes,
        )
        self.ledger.begin(work)
        for load in {reader.incarnation: reader, decode.incarnation: decode}.values():
            self._index.note(
                load.incarnation, prompt, load.layout.block_size, load.num_cache_blocks
            )
        if session:
            self._sessions[session] = decode.incarnation
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return Lease(placement, need.num_prompt_tokens, work)

    def hear(self, lease: Lease, event: Event, now_s: float) -> None:
        """Take what a worker reports of its part."""
        work = lease.work
        if work is None:
            return
        match event:
            case FirstToken():
                self._read(lease, work, event.report, now_s)
            case TransferReport():
                self.ledger.shipped(work)
                self.rates.note_transfer(work.link, event, now_s)
            case NewToken():
                self.ledger.shipped(work)
                if event.prefill is not None:
                    self._read(lease, work, event.prefill, now_s)
                if event.done is not None:
                    self.rates.note_decode(work.decode, event.done.report.decode_s)
                    self.demand.answered(event.done.report.decode_s, now_s)

    def end(self, lease: Lease, request: Request, output_token_ids: Sequence[int]) -> None:
        """The attempt is over; its decode worker has the answer cached, too. Called once."""
        if lease.work is None:
            return
        self.ledger.end(lease.work)
        if output_token_ids:
            answered = PromptBlocks((*request.prompt_token_ids, *output_token_ids))
            self._index.extend(lease.work.decode, answered)

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget every worker but these."""
        self._index.keep(incarnations)
        self.rates.keep(incarnations)

    def backlog(self, loads: Loads, ahead: Sequence[Ticket], need: Need) -> Backlog:
        """What is to be done before a new request, tickets that wait in line before it included."""
        ledger, rates = self.ledger, self.rates
        num_prompt_tokens = ledger.num_all_prompt_tokens(loads.readers)
        num_kv_tokens = ledger.num_all_kv_tokens(loads.decoders) + need.num_tokens
        return Backlog(
            num_prompt_tokens=num_prompt_tokens + sum(t.num_prompt_tokens for t in ahead),
            prefill_tokens_per_s=rates.all_prefill_tokens_per_s(loads.readers) or None,
            num_link_bytes=ledger.num_all_bytes,
            link_bytes_per_s=rates.link_bytes_per_s(),
            num_sequences=ledger.num_all_sequences(loads.decoders) + len(ahead) + 1,
            num_slots=loads.num_slots,
            num_kv_tokens=num_kv_tokens + sum(t.num_tokens for t in ahead),
            num_cache_tokens=loads.num_cache_tokens,
            decode_s=rates.decode_s(),
        )

    def _read(self, lease: Lease, work: Work, report: PrefillReport, now_s: float) -> None:
        self.ledger.read(work)
        if lease.placement.held_id is not None:
            return  # it was read before, elsewhere
        num_tokens = max(lease.num_prompt_tokens - report.num_cached_tokens, 0)
        self.demand.read(num_tokens, now_s)
        self.rates.note_prefill(work.reader, num_tokens, report.queue_s + report.prefill_s, now_s)

    # Both are called for every worker at every placement, where dataclasses.replace would take
    # most of the time.
    def _prefill(self, load: PrefillLoad, prompt: PromptBlocks) -> PrefillLoad:
        name, block_size = load.incarnation, load.layout.block_size
        return PrefillLoad(
            name=load.name,
            incarnation=name,
            layout=load.layout,
            num_prompt_tokens=self.ledger.num_prompt_tokens(name),
            max_num_tokens=load.max_num_tokens,
            num_cache_blocks=load.num_cache_blocks,
            num_prompts=self.ledger.num_prompts(name),
            num_cached_tokens=self._index.num_cached_tokens(name, prompt, block_size),
            tokens_per_s=self.rates.prefill_tokens_per_s(name),
        )

    def _decode(self, load: DecodeLoad, prompt: PromptBlocks, served: str) -> DecodeLoad:
        name, block_size = load.incarnation, load.layout.block_size
        return DecodeLoad(
            name=load.name,
            incarnation=name,
            layout=load.layout,
            num_sequences=self.ledger.num_sequences(name),
            max_num_sequences=load.max_num_sequences,
            max_num_tokens=load.max_num_tokens,
            num_cache_blocks=load.num_cache_blocks,
            num_kv_tokens=self.ledger.num_kv_tokens(name),
            num_prompt_tokens=self.ledger.num_prompt_tokens(name),
            num_cached_tokens=self._index.num_cached_tokens(name, prompt, block_size),
            tokens_per_s=self.rates.prefill_tokens_per_s(name),
            is_of_session=served == name,
        )
