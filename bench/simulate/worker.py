"""Workers of both phases: the product's schedulers and meters around modelled devices and links.

A prefill worker has one device and one link: what a step read goes on the link when the step ends,
after what is already on it. A decode worker takes as many steps at once as its batch stays the
same; a sequence that joins meanwhile waits for the end of the step that runs.
"""

from collections.abc import Callable
from functools import partial

from bench.simulate.site import Site
from bench.simulate.trip import Trip
from core.request import RequestId
from core.signals import Window
from core.worker import Role, WorkerInfo
from decode_worker import scheduler as decoding
from decode_worker.meter import DecodeMeter
from deploy.autoscaler.facts import Load
from kv_link.link import LinkLoad
from prefill_worker import scheduler as reading
from prefill_worker.meter import PrefillMeter

Tell = Callable[[Trip], None]


class PrefillModel:
    """Reads prompts in chunks; `read` and `sealed` are told of each prompt once."""

    def __init__(
        self,
        info: WorkerInfo,
        site: Site,
        scheduler: reading.Scheduler,
        tell: tuple[Tell, Tell],
    ) -> None:
        self.info = info
        self.busy_s = 0.0
        self._site = site
        self._scheduler = scheduler
        self._tell_read, self._tell_sealed = tell
        self._meter = PrefillMeter()
        self._carried = Window()
        self._prompts: dict[RequestId, Trip] = {}
        self._num_parked = 0
        self._is_stepping = False
        self._is_lost = False
        self._link_free_s = 0.0

    @property
    def num_requests(self) -> int:
        """Prompts that are not read, or whose KV cache is not sealed."""
        return len(self._prompts) + self._num_parked

    def add(self, trip: Trip) -> None:
        """Let a prompt wait for its turn."""
        self._prompts[trip.request_id] = trip
        if not self._is_stepping:
            self._step()

    def drop(self, trip: Trip) -> None:
        """Forget a prompt that another worker failed, wherever it is here."""
        if self._prompts.pop(trip.request_id, None) is None and trip.sealed_s is None:
            self._num_parked -= 1

    def lose(self) -> None:
        """It works no more, and nobody hears of what it had."""
        self._is_lost = True
        if self._is_stepping:
            self._site.crowd.turned(Role.PREFILL, is_busy=False)

    def load(self) -> Load:
        """What it would tell a router."""
        now_s = self._site.now_s
        unread = [trip for trip in self._prompts.values() if trip.first_step_s is None]
        waits_s = [now_s - (trip.placed_s or now_s) for trip in unread]
        rate = self._site.link_bytes_per_s
        num_in_flight = int(max(self._link_free_s - now_s, 0.0) * rate)
        carried = self._carried.per_s(now_s)
        link = LinkLoad(num_in_flight, carried, None if carried is None else rate)
        return Load(
            num_waiting=len(unread),
            num_queued_tokens=sum(trip.num_unread_tokens for trip in self._prompts.values()),
            num_running=len(self._prompts) - len(unread),
            signals=self._meter.signals(
                now_s,
                oldest_wait_s=max(waits_s, default=0.0),
                num_parked=self._num_parked,
                links=[link],
            ),
        )

    def _step(self) -> None:
        now_s = self._site.now_s
        shares = self._scheduler.schedule(
            [reading.Candidate(id_, trip.num_unread_tokens) for id_, trip in self._prompts.items()]
        )
        if self._is_stepping != bool(shares):
            self._is_stepping = bool(shares)
            self._site.crowd.turned(Role.PREFILL, is_busy=self._is_stepping)
        if not shares:
            return
        seconds = 0.0
        for share in shares:
            trip = self._prompts[share.request_id]
            if trip.first_step_s is None:
                trip.first_step_s = now_s
                self._meter.waited(now_s - (trip.placed_s or now_s), now_s)
            num_before = trip.arrival.num_prompt_tokens - trip.num_unread_tokens
            seconds += self._site.machine.prefill_s(share.num_tokens, num_before)
        seconds *= self._site.crowd.pace(Role.PREFILL)
        self._site.agenda.at(now_s + seconds, lambda: self._end_step(shares, seconds))

    def _end_step(self, shares: tuple[reading.Share, ...], seconds: float) -> None:
        if self._is_lost:
            return
        now_s = self._site.now_s
        self.busy_s += seconds
        self._meter.step(sum(share.num_tokens for share in shares), seconds, now_s)
        for share in shares:
            trip = self._prompts.get(share.request_id)
            if trip is None:  # dropped while the step ran
                continue
            trip.num_unread_tokens -= share.num_tokens
            trip.compute_s += seconds
            self._push(share.num_tokens * self.info.layout.token_bytes)
            if trip.num_unread_tokens == 0:
                del self._prompts[share.request_id]
                self._num_parked += 1
                trip.first_token_s = now_s
                trip.told_s = trip.told_s or now_s
                sealed_s = self._link_free_s + self._site.machine.link_latency_s
                self._site.agenda.at(sealed_s, partial(self._seal, trip))
                self._tell_read(trip)
        self._step()

    def _push(self, num_bytes: int) -> None:
        seconds = num_bytes / self._site.link_bytes_per_s
        self._link_free_s = max(self._link_free_s, self._site.now_s) + seconds
        self._site.agenda.at(
            self._link_free_s, lambda: self._carried.note(num_bytes, self._site.now_s)
        )

    def _seal(self, trip: Trip) -> None:
        if trip.is_over:  # a worker failed it on the way
            return
        now_s = self._site.now_s
        self._num_parked -= 1
        trip.sealed_s = now_s
        self._meter.sealed(now_s - (trip.first_token_s or now_s), now_s)
        self._tell_sealed(trip)


class DecodeModel:
    """Makes tokens for sequences whose KV cache is there; `done` is told of each once."""

    def __init__(
        self,
        info: WorkerInfo,
        site: Site,
        scheduler: decoding.Scheduler,
        done: Tell,
    ) -> None:
        self.info = info
        self.num_reserved = 0
        self.num_kv_tokens = 0
        self._site = site
        self._scheduler = scheduler
        site.crowd.watch(self._retime)
        self._tell_done = done
        self._num_slots = info.max_num_sequences
        self._num_cache_tokens = info.num_blocks * info.layout.block_size
        self._meter = DecodeMeter()
        self._ready: dict[RequestId, Trip] = {}
        self._batch: list[Trip] = []
        self._num_steps = 0
        self._started_s = 0.0
        self._step_s = 0.0
        self._version = 0
        self._is_busy = False

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks here."""
        return self.num_reserved

    def reserve(self, num_tokens: int) -> None:
        """A request was placed here; its place in line was the wait for blocks."""
        self.num_reserved += 1
        self.num_kv_tokens += num_tokens
        self._meter.waited(0.0, self._site.now_s)

    def add(self, trip: Trip) -> None:
        """A sequence whose KV cache is sealed; it joins at the end of the step that runs."""
        self._ready[trip.request_id] = trip
        if not self._batch:
            self._start()
        elif len(self._batch) < self._num_slots:
            self._retime()

    def release(self, trip: Trip) -> None:
        """Its answer was complete with its first token, or is now; its blocks are free."""
        self._free(trip)
        trip.ended_s = self._site.now_s
        self._tell_done(trip)

    def drop(self, trip: Trip) -> None:
        """Forget a request that another worker failed."""
        self._free(trip)
        self._ready.pop(trip.request_id, None)
        self._retime()

    def lose(self) -> None:
        """It works no more; trips that decode know what they were given until now."""
        num_made = min(
            int((self._site.now_s - self._started_s) / (self._step_s or 1)), self._num_steps
        )
        for trip in self._batch:
            trip.num_left_tokens -= num_made
        self._version += 1
        if self._is_busy:
            self._site.crowd.turned(Role.DECODE, is_busy=False)

    def _free(self, trip: Trip) -> None:
        self.num_reserved -= 1
        self.num_kv_tokens -= trip.need.num_tokens

    def load(self) -> Load:
        """What it would tell a router."""
        now_s = self._site.now_s
        return Load(
            num_running=len(self._ready),
            num_slots=self._num_slots,
            num_reservations=self.num_reserved,
            kv_use=min(self.num_kv_tokens / self._num_cache_tokens, 1.0),
            signals=self._meter.signals(now_s, oldest_wait_s=0.0),
        )

    def _retime(self) -> None:
        """Let the batch end with the step that runs: the next may be another, or take longer."""
        if self._batch:
            elapsed_s = self._site.now_s - self._started_s
            self._run_until(min(int(elapsed_s / self._step_s) + 1, self._num_steps))

    def _start(self) -> None:
        now_s = self._site.now_s
        was_busy, self._is_busy = self._is_busy, bool(self._ready)
        if was_busy != self._is_busy:
            self._site.crowd.turned(Role.DECODE, is_busy=self._is_busy)
        shares = self._scheduler.schedule(list(self._ready), ())
        self._batch = [self._ready[share.request_id] for share in shares]
        if not self._batch:
            return
        for trip in self._batch:
            if trip.first_decode_s is None:
                trip.first_decode_s = now_s
                self._meter.waited(now_s - (trip.sealed_s or now_s), now_s)
        num_steps = min(trip.num_left_tokens for trip in self._batch)
        history: float = sum(
            trip.need.num_prompt_tokens + trip.arrival.num_output_tokens - trip.num_left_tokens
            for trip in self._batch
        )
        # Over the steps taken at once the history grows evenly: the mean step is exact.
        history += len(self._batch) * (num_steps - 1) / 2
        self._step_s = self._site.machine.decode_s(len(self._batch), history)
        self._step_s *= self._site.crowd.pace(Role.DECODE)
        self._started_s = now_s
        self._run_until(num_steps)

    def _run_until(self, num_steps: int) -> None:
        """End the batch after `num_steps` steps from its start."""
        self._num_steps = num_steps
        self._version += 1
        version = self._version
        end_s = self._started_s + num_steps * self._step_s
        self._site.agenda.at(end_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        now_s = self._site.now_s
        self._meter.step(self._step_s, now_s)
        batch, self._batch = self._batch, []
        ended = []
        for trip in batch:
            if trip.request_id not in self._ready:  # dropped while the steps ran
                continue
            trip.num_left_tokens -= self._num_steps
            if trip.num_left_tokens == 0:
                del self._ready[trip.request_id]
                ended.append(trip)
        self._start()
        for trip in ended:
            self.release(trip)
