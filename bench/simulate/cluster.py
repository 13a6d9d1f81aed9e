"""One run: a configuration, a machine, a trace, and who decides how many workers there are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.simulate.agenda import Agenda
from bench.simulate.crowd import Crowd
from bench.simulate.door import Door
from bench.simulate.fleet import Fleet, Model
from bench.simulate.machine import Machine
from bench.simulate.trace import Arrival, TraceBlocks
from bench.simulate.trip import Trip
from bench.simulate.worker import DecodeModel, PrefillModel
from core.config import ClusterConfig, PoolConfig
from core.errors import ConfigError
from core.layout import KVLayout
from core.request import Priority, RequestId, WorkerName
from core.worker import Role, WorkerInfo
from decode_worker import scheduler as decoding
from deploy.autoscaler.autoscaler import tick
from deploy.autoscaler.facts import ClusterFacts
from deploy.autoscaler.fit import Pair
from deploy.autoscaler.history import State
from deploy.autoscaler.record import Action, Record
from prefill_worker import scheduler as reading
from router.config import FrontDoorConfig
from router.placing.fairness import Ticket
from router.placing.placement import Need, Placement

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
    """What a run gave: every request, and the pools' sizes at each interval, (time, sizes)."""

    trips: list[Trip]
    sizes: list[tuple[float, Pair]]
    worker_s: float
    ended_s: float


class Simulation:
    """The cluster; `run` plays a trace to its end, once."""

    def __init__(self, config: ClusterConfig, machine: Machine, *, decide: Decide | None) -> None:
        pool = config.prefill_pool
        if pool is None:
            raise ConfigError("mode", f"{config.mode} is not simulated; disaggregated is")
        self._config = config
        self._machine = machine
        self._decide = decide
        self._layout = KVLayout(
            "simulated", config.engine_of(config.decode).dtype, BLOCK_TOKENS,
            NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM,
        )  # fmt: skip
        self._agenda = Agenda()
        self._crowd = Crowd(machine)
        self._trips: list[Trip] = []
        self._num_open = 0
        self._sizes: list[tuple[float, Pair]] = []
        self._door = Door(
            FrontDoorConfig.from_cluster(config).dispatch,
            self._agenda,
            deadline_s=config.router.default_deadline_s,
            placed=self._placed,
            given_up=self._given_up,
        )
        self._fleet = Fleet(self._agenda, self._make, start_s=START_S, changed=self._changed)
        self._fleet.begin(Pair(pool.replicas, config.decode.replicas))

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        """Play the trace; ends when the last request has ended."""
        self._num_open = len(arrivals)
        coming = iter(arrivals)

        def next_arrival() -> None:
            if (arrival := next(coming, None)) is not None:
                at_s = arrival.at_s + self._machine.request_s
                self._agenda.at(at_s, lambda: enter(arrival))

        def enter(arrival: Arrival) -> None:
            next_arrival()
            self._door.enter(self._trip(arrival))

        next_arrival()
        self._look()
        self._agenda.run(lambda: self._num_open == 0)
        return Run(self._trips, self._sizes, self._fleet.worker_s, self._agenda.now_s)

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

    def _trip(self, arrival: Arrival) -> Trip:
        num_tokens = arrival.num_prompt_tokens + arrival.num_output_tokens
        ticket = Ticket(
            client="trace",
            priority=Priority.NORMAL,
            is_begun=False,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_tokens=num_tokens,
            arrived_s=self._agenda.now_s,
        )
        trip = Trip(
            RequestId(str(len(self._trips))),
            arrival,
            Need(arrival.num_prompt_tokens, num_tokens),
            TraceBlocks(arrival),
            ticket,
            self._machine.prefill_s(arrival.num_prompt_tokens, 0),
        )
        trip.num_left_tokens = arrival.num_output_tokens - 1  # the first comes from prefill
        self._trips.append(trip)
        return trip

    def _placed(self, trip: Trip, placement: Placement) -> None:
        assert trip.lease is not None and trip.lease.work is not None
        assert placement.prefill is not None
        trip.num_unread_tokens = max(trip.lease.work.num_prompt_tokens, 1)
        reader, decode = self._fleet.model(placement.prefill), self._fleet.model(placement.decode)
        assert isinstance(reader, PrefillModel)
        assert isinstance(decode, DecodeModel)
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
        self._door.done(trip)
        self._fleet.sweep(trip.lease.placement.decode)

    def _given_up(self, trip: Trip, why: str) -> None:
        trip.failure = why
        self._num_open -= 1

    def _make(self, role: Role, name: WorkerName) -> Model:
        info, machine = self._info(role, name), self._machine
        place = (self._agenda, self._crowd)
        if role is Role.PREFILL:
            reader = reading.Scheduler(self._pool(role).max_batch_tokens)
            return PrefillModel(info, machine, reader, place, (self._door.read, self._sealed))
        pool = self._config.decode
        scheduler = decoding.Scheduler(
            self._config.mode,
            max_batch_tokens=pool.max_batch_tokens,
            max_num_sequences=pool.max_num_sequences,
        )
        return DecodeModel(info, machine, scheduler, place, self._done)

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
