"""Where the time of one answer goes, as the router sees it: its phases and its events.

Filled by `Answer` as things happen; the workers' own events come with their reports. A moment is
noted once and serves both, so phases and events agree.

Pure: facts and times in.
"""

from collections.abc import Iterable
from dataclasses import replace

from core.events.event import ROUTER, BoundedEvents, Event, EventKind
from core.request import id_of_attempt
from core.timeline import DecodeReport, Phases, PrefillReport, TransferReport

# A delivery that takes longer is an event of its own, at most so many of them.
SLOW_DELIVERY_S = 0.1
MAX_SLOW_DELIVERIES = 16
# Of one answer, however often it was tried.
MAX_EVENTS = 512


class Record:
    """Of one answer. The phases are those of the last attempt, the events those of all."""

    def __init__(self, received_s: float, tokenize_s: float) -> None:
        self.received_s = received_s
        self._tokenize_s = tokenize_s
        self._attempt = 0
        self._first_placed_s = received_s
        self._placed_s = received_s
        self._reserve_s = 0.0
        self._token_arrived_s = received_s
        self._first_arrived_s = received_s
        self._first_delivered_s: float | None = None
        self._last_delivered_s = received_s
        self._num_deliveries = 0
        self._slow_deliveries = BoundedEvents(MAX_SLOW_DELIVERIES)
        tokenized_s = self._waited_since_s = received_s + tokenize_s
        self._events = [
            Event(EventKind.RECEIVED, received_s, received_s, ROUTER),
            Event(EventKind.TOKENIZE, received_s, tokenized_s, ROUTER),
        ]

    @property
    def is_delivered(self) -> bool:
        """Whether anything was."""
        return self._first_delivered_s is not None

    def placed(self, now_s: float, why: str) -> None:
        """Workers were chosen for the next attempt."""
        if self._attempt == 0:
            self._first_placed_s = now_s
        self._attempt += 1
        self._placed_s, self._reserve_s = now_s, 0.0
        self._note(EventKind.LINE, self._waited_since_s, now_s)
        self._note(EventKind.PLACED, now_s, now_s, why)

    def unplaced(self, now_s: float) -> None:
        """It ends now and needed no worker, or got none."""
        self._first_placed_s = self._placed_s = now_s

    def reserved(self, arrived_s: float) -> None:
        """Decode granted the blocks."""
        self._reserve_s = arrived_s - self._placed_s
        self._note(EventKind.RESERVE, self._placed_s, arrived_s)

    def heard(self, events: Iterable[Event], num_resumed_tokens: int) -> None:
        """What a worker told of this attempt, in the words of users.

        That is places in the whole answer, and the ids of requests without their attempts.
        """
        for event in events:
            index = event.index
            if event.kind in (EventKind.STEPS, EventKind.GAP):
                index += num_resumed_tokens
            others = tuple(dict.fromkeys(map(id_of_attempt, event.request_ids)))
            self._add(replace(event, attempt=self._attempt, index=index, request_ids=others))

    def token_arrived(self, arrived_s: float, *, is_first: bool) -> None:
        """A token came; is_first of this attempt."""
        self._token_arrived_s = arrived_s
        if is_first:
            self._first_arrived_s = arrived_s

    def delivered(self, now_s: float) -> None:
        """All tokens that may be told were handed to the transport."""
        if self._first_delivered_s is None:
            self._first_delivered_s = now_s
            self._note(EventKind.FIRST_TOKEN, self._token_arrived_s, now_s)
        elif now_s - self._token_arrived_s > SLOW_DELIVERY_S:
            kind, attempt = EventKind.SLOW_DELIVERY, self._attempt
            slow = Event(kind, self._token_arrived_s, now_s, ROUTER, attempt)
            self._slow_deliveries.add(slow)
        self._last_delivered_s = now_s
        self._num_deliveries += 1

    def failed(self, now_s: float, error: Exception) -> None:
        """The attempt is over; another may follow."""
        self._waited_since_s = now_s
        self._note(EventKind.FAILED, self._placed_s, now_s, str(error))

    def phases(
        self,
        prefill: PrefillReport,
        transfer: TransferReport | None,
        decode: DecodeReport | None,
        now_s: float,
    ) -> Phases:
        """The phases of an answer that ends now; reports are those of its last attempt."""
        first_delivered_s = now_s if self._first_delivered_s is None else self._first_delivered_s
        exposed_s = transfer.exposed_s if transfer is not None else 0.0
        return Phases(
            tokenize_s=self._tokenize_s,
            place_s=self._first_placed_s - self.received_s - self._tokenize_s,
            recovery_s=self._placed_s - self._first_placed_s,
            reserve_s=self._reserve_s,
            queue_s=prefill.queue_s,
            prefill_s=prefill.prefill_s,
            exposed_transfer_s=exposed_s,
            slot_wait_s=decode.slot_wait_s if decode is not None else 0.0,
            decode_s=self._seen_decode_s(exposed_s) if decode is None else decode.decode_s,
            delivery_s=self._last_delivered_s - self._token_arrived_s,
            total_s=now_s - self.received_s,
            time_to_first_token_s=first_delivered_s - self.received_s,
        )

    def events(self, total_s: float | None) -> tuple[Event, ...]:
        """All events in order of their begin; total_s after it began it ended, None if it runs."""
        told = [*self._events, *self._slow_deliveries.all()]
        if self._first_delivered_s is not None and self._num_deliveries > 1:
            told += [
                replace(
                    self._event(
                        EventKind.DELIVERIES, self._first_delivered_s, self._last_delivered_s
                    ),
                    count=self._num_deliveries,
                ),
                self._event(EventKind.LAST_TOKEN, self._token_arrived_s, self._last_delivered_s),
            ]
        if total_s is not None:
            end_s = self.received_s + total_s
            told.append(self._event(EventKind.END, end_s, end_s))
        return tuple(sorted(told, key=lambda event: (event.begin_s, event.end_s)))

    def _seen_decode_s(self, exposed_s: float) -> float:
        """Of an answer that was stopped here: what lies between two arrivals."""
        return max(self._token_arrived_s - self._first_arrived_s - exposed_s, 0.0)

    def _event(self, kind: EventKind, begin_s: float, end_s: float, note: str = "") -> Event:
        return Event(kind, begin_s, end_s, ROUTER, max(self._attempt, 1), note=note)

    def _note(self, kind: EventKind, begin_s: float, end_s: float, note: str = "") -> None:
        self._add(self._event(kind, begin_s, end_s, note))

    def _add(self, event: Event) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
