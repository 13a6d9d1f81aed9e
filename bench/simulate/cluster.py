"""One run: a configuration, a machine, a trace, and who decides how many workers there are."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.simulate.agenda import Agenda
from bench.simulate.crowd import Crowd
from bench.simulate.door import Door
from bench.simulate.fault import Faults
from bench.simulate.fleet import Fleet, Model
from bench.simulate.machine import Machine
from bench.simulate.site import Site
from bench.simulate.trace import Arrival
from bench.simulate.trip import Trip
from bench.simulate.worker import DecodeModel, PrefillModel
from core.config import ClusterConfig, PoolConfig
from core.errors import ConfigError, PeerLost
from core.layout import KVLayout
from core.request import RequestId, WorkerName
from core.worker import Role, WorkerInfo
from decode_worker import scheduler as decoding
from deploy.autoscaler.autoscaler import tick
from deploy.autoscaler.facts import ClusterFacts
from deploy.autoscaler.fit import Pair
from deploy.autoscaler.history import State
from deploy.autoscaler.record import Action, Record
from prefill_worker import scheduler as reading
from router.config import FrontDoorConfig
from router.placing.placement import Placement
from router.placing.recovery import Failure, Recovery

# SmolLM2-135M, which the machine's figures are of.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64
BLOCK_TOKENS = 16
MAX_CONTEXT_TOKENS = 8192
DEFAULT_KV_BYTES = 1 << 30
# Process, weights and first links of a worker, with a margin.
START_S = 20.0

Decide = Callable[[ClusterFacts, float], tuple[Action, ...]]


@dataclass(slots=True)
class Autoscaled:
    """Decisions of the product's autoscaler, and their records."""

    config: ClusterConfig
    state: State = State()
    records: list[Record] = field(default_factory=list)

    def __call__(self, facts: ClusterFacts, now_s: float) -> tuple[Action, ...]:
        """What to do now."""
        assert self.config.scaling is not None
        record, self.state = tick(self.config.scaling, facts, now_s, self.state)
        self.records.append(record)
        return () if record.is_dry_run else record.actions


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave.

    trips: the last attempt at every request; sizes: of both pools, at each interval; losses:
    workers that were lost, and when.
    """

    trips: list[Trip]
    sizes: list[tuple[float, Pair]]
    worker_s: float
    ended_s: float
    losses: tuple[tuple[float, WorkerName], ...] = ()


class Simulation:
    """The cluster; `run` plays a trace to its end, once."""

    def __init__(
        self,
        config: ClusterConfig,
        machine: Machine,
        *,
        decide: Decide | None,
        faults: Faults = Faults(),
    ) -> None:
        pool = config.prefill_pool
        if pool is None:
            raise ConfigError("mode", f"{config.mode} is not simulated; disaggregated is")
        self._config = config
        self._decide = decide
        self._layout = KVLayout(
            "simulated", config.engine_of(config.decode).dtype, BLOCK_TOKENS,
            NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM,
        )  # fmt: skip
        self._agenda = Agenda()
        self._site = Site(self._agenda, machine, Crowd(machine), faults)
        self._trips: dict[int, Trip] = {}
        self._inside: dict[RequestId, int] = {}
        self._losses: list[tuple[float, WorkerName]] = []
        self._draw = random.Random(faults.seed)
        self._num_open = 0
        self._sizes: list[tuple[float, Pair]] = []
        self._policy = FrontDoorConfig.from_cluster(config).dispatch
        self._door = Door(
            self._policy,
            self._agenda,
            deadline_s=config.router.default_deadline_s,
            placed=self._placed,
            given_up=self._given_up,
        )
        self._fleet = Fleet(self._site, self._make, start_s=START_S, changed=self._changed)
        self._fleet.begin(Pair(pool.replicas, config.decode.replicas))

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        """Play the trace; ends when the last request has ended."""
        self._num_open = len(arrivals)
        coming = iter(arrivals)

        def next_arrival() -> None:
            if (arrival := next(coming, None)) is not None:
                at_s = arrival.at_s + self._site.machine.request_s
                self._agenda.at(at_s, lambda: enter(arrival))

        def enter(arrival: Arrival) -> None:
            next_arrival()
            number = len(self._trips)
            recovery = Recovery(self._policy.on_failure, self._policy.max_attempts)
            alone_s = self._site.machine.prefill_s(arrival.num_prompt_tokens, 0)
            trip = Trip.of(number, arrival, recovery, self._agenda.now_s, alone_s)
            self._trips[number] = trip
            self._door.enter(trip)

        next_arrival()
        self._look()
        for at_s, role in self._site.faults.losses:
            self._agenda.at(at_s, partial(self._lose_one, (role,)))
        self._lose_next()
        self._agenda.run(lambda: self._num_open == 0)
        trips, losses = [*self._trips.values()], tuple(self._losses)
        return Run(trips, self._sizes, self._fleet.worker_s, self._agenda.now_s, losses)

    def _look(self) -> None:
        """Note the sizes, and decide; again after each interval."""
        now_s = self._agenda.now_s
        if self._decide is not None:
            self._fleet.do(
                self._decide(ClusterFacts(self._fleet.facts(), self._door.demand), now_s)
            )
        numbers = Pair(self._fleet.count(Role.PREFILL), self._fleet.count(Role.DECODE))
        self._sizes.append((now_s, numbers))
        scaling = self._config.scaling
        self._agenda.at(now_s + (scaling.interval_s if scaling else 5.0), self._look)

    def _lose_next(self) -> None:
        """Lose a worker at random after a random time, and go on so."""
        num_workers = len(self._fleet.names)
        per_s = self._site.faults.lost_per_hour * max(num_workers, 1) / 3600

        def lose() -> None:
            self._lose_one(tuple(Role))
            self._lose_next()

        if per_s:
            self._agenda.at(self._agenda.now_s + self._draw.expovariate(per_s), lose)

    def _lose_one(self, roles: tuple[Role, ...]) -> None:
        names = [model.info.name for role in roles for model in self._fleet.serving(role)]
        if not names:
            return
        name = self._draw.choice(names)
        self._losses.append((self._agenda.now_s, name))
        self._fleet.model(name).lose()
        self._fleet.lose(name)
        for number in list(self._inside.values()):
            if self._trips[number].is_at(name):
                self._fail(number, name)

    def _fail(self, number: int, lost: WorkerName) -> None:
        """A worker of a request is lost: another attempt takes its place, by the router's rules."""
        trip = self._trips[number]
        assert trip.lease is not None
        placement = trip.lease.placement
        trip.is_over = True
        del self._inside[trip.request_id]
        for name in (placement.prefill, placement.decode):
            if name not in (None, lost) and (name == placement.decode or trip.sealed_s is None):
                self._fleet.model(name).drop(trip)
                self._fleet.sweep(name)
        self._door.failed(trip)
        failure = Failure(PeerLost(lost, "it was lost"), is_from_prefill=lost == placement.prefill)
        try:
            trip.recovery.failed(failure, placement)
        except PeerLost as error:
            return self._given_up(trip, str(error))
        if trip.num_emitted_tokens == trip.arrival.num_output_tokens:
            trip.ended_s = self._agenda.now_s
            self._num_open -= 1
            return
        self._trips[number] = trip.again(self._agenda.now_s)
        self._door.enter(self._trips[number])

    def _placed(self, trip: Trip, placement: Placement) -> None:
        assert trip.lease is not None and trip.lease.work is not None
        assert placement.prefill is not None
        trip.num_unread_tokens = max(trip.lease.work.num_prompt_tokens, 1)
        reader, decode = self._fleet.model(placement.prefill), self._fleet.model(placement.decode)
        assert isinstance(reader, PrefillModel)
        assert isinstance(decode, DecodeModel)
        self._inside[trip.request_id] = int(trip.request_id.rstrip("+"))
        decode.reserve(trip.need.num_tokens)
        reader.add(trip)

    def _sealed(self, trip: Trip) -> None:
        assert trip.lease is not None
        self._door.sealed(trip)
        decode = self._fleet.model(trip.lease.placement.decode)
        assert isinstance(decode, DecodeModel)
        if trip.num_left_tokens == 0:
            decode.release(trip)
        else:
            decode.add(trip)
        assert trip.lease.placement.prefill is not None
        self._fleet.sweep(trip.lease.placement.prefill)

    def _done(self, trip: Trip) -> None:
        assert trip.lease is not None
        self._num_open -= 1
        del self._inside[trip.request_id]
        self._door.done(trip)
        self._fleet.sweep(trip.lease.placement.decode)

    def _given_up(self, trip: Trip, why: str) -> None:
        trip.failure = why
        self._num_open -= 1

    def _make(self, role: Role, name: WorkerName) -> Model:
        info = self._info(role, name)
        if role is Role.PREFILL:
            reader = reading.Scheduler(self._pool(role).max_batch_tokens)
            return PrefillModel(info, self._site, reader, (self._door.read, self._sealed))
        pool = self._config.decode
        scheduler = decoding.Scheduler(
            self._config.mode,
            max_batch_tokens=pool.max_batch_tokens,
            max_num_sequences=pool.max_num_sequences,
        )
        return DecodeModel(info, self._site, scheduler, self._done)

    def _changed(self) -> None:
        infos = {role: [model.info for model in self._fleet.serving(role)] for role in Role}
        self._door.workers_are(infos[Role.PREFILL], infos[Role.DECODE], self._fleet.names)

    def _info(self, role: Role, name: WorkerName) -> WorkerInfo:
        return WorkerInfo(
            name=name,
            role=role,
            incarnation=name,
            model=self._config.model,
            layout=self._layout,
            num_blocks=(self._pool(role).kv_cache or DEFAULT_KV_BYTES) // self._layout.block_bytes,
            max_context_tokens=self._config.engine.max_context_tokens or MAX_CONTEXT_TOKENS,
            vocab_size=0,
            max_num_sequences=self._config.decode.max_num_sequences,
            kernels="model",
        )

    def _pool(self, role: Role) -> PoolConfig:
        pool = self._config.prefill_pool if role is Role.PREFILL else self._config.decode
        assert pool is not None
        return pool
