"""The line before the workers, over the real fleet: who waits, who is refused, nothing is left."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.config import Mode
from core.errors import InvalidRequest, Overloaded, PeerLost, TwophaseError
from core.request import Priority, Resumption, Sender
from core.settings.router import OnFailure
from core.worker import FirstToken, Role
from router.answer import Answer
from router.members.fleet import Fleet
from router.placing import rates
from router.placing.line import Placing
from router.placing.load import DecodeLoad, PrefillLoad
from router.placing.recovery import Recovery
from router.policy import DispatchPolicy
from tests.unit.router.doubles import (
    DONE,
    FIRST,
    LAYOUT,
    PREFILL_REPORT,
    TRANSFER_REPORT,
    make_info,
    make_request,
    token,
    until,
)

SOON_S = 0.03


class Members(Fleet):
    """A fleet whose workers are told, not connected."""

    is_incomplete = False

    def __init__(self, clock):
        super().__init__(clock, worker_timeout_s=1.0, wedged_after_s=1.0)
        self.infos = []

    def members(self, role):
        return [Told(info) for info in self.infos if info.role is role]

    def prefill_loads(self):
        return [m.load for m in self.members(Role.PREFILL)]

    def decode_loads(self):
        return [m.load for m in self.members(Role.DECODE)]

    def join(self, name, role=Role.DECODE, **changes):
        self.infos.append(make_info(name, role, incarnation=f"{name}-life", **changes))
        self.announce()

    def leave(self, name):
        self.infos = [info for info in self.infos if info.name != name]
        self.announce()


class Told:
    def __init__(self, info):
        self.info = info
        kind = DecodeLoad if info.role is Role.DECODE else PrefillLoad
        self.load = kind.of(info, 0)


class Line:
    """One Placing, and requests that come and go as the test says."""

    def __init__(self, mode=Mode.CHUNKED, **policy):
        self.clock = ManualClock(1000.0)
        self.fleet = Members(self.clock)
        self.placing = Placing(self.fleet, DispatchPolicy(mode, **policy), self.clock)
        self.inside = []
        self.num_joined = 0
        self.leases = {}
        self.answers = {}

    @asynccontextmanager
    async def watched(self):
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.placing.watch())
            yield self
            watching.cancel()

    def start(
        self,
        request_id="r",
        *,
        client="",
        priority=Priority.NORMAL,
        session="",
        resumption=None,
        **request,
    ):
        request = dataclasses.replace(
            make_request(request_id, **request),
            sender=Sender(client, session, priority),
            resumption=resumption,
        )
        return asyncio.create_task(
            self.run(request, Recovery(OnFailure.RESUME, 4), asyncio.Event())
        )

    async def run(self, request, recovery, done):
        answer = self.answers[request.request_id] = Answer(request, self.clock.now_s(), 0.0)
        async with self.placing.placed(answer, recovery, None) as lease:
            self.inside.append(request.request_id)
            self.leases[request.request_id] = (lease, done)
            try:
                await done.wait()
            finally:
                self.inside.remove(request.request_id)
        return lease.placement

    def end(self, request_id):
        self.leases[request_id][1].set()

    def nothing_is_left(self):
        assert self.placing.num_waiting == 0
        assert self.placing.knowledge.ledger.is_empty
        assert self.placing._waiting == {}


@pytest.fixture
def line():
    """One decode worker with two slots, that is room for four requests."""
    line = Line(max_queue_s=SOON_S)
    line.fleet.join("d", max_num_sequences=2, num_blocks=1000)
    return line


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_beyond_the_room_wait_and_follow_as_others_end(line):
    line = Line()
    line.fleet.join("d", max_num_sequences=2, num_blocks=1000)
    tasks = [line.start(f"r{number}") for number in range(6)]
    await settle()
    assert (line.inside, line.placing.num_waiting) == (["r0", "r1", "r2", "r3"], 2)
    line.end("r2")
    await settle()
    assert (line.inside, line.placing.num_waiting) == (["r0", "r1", "r3", "r4"], 1)
    for _ in range(2):
        for request_id in list(line.inside):
            line.end(request_id)
        await settle()
    assert all(task.done() for task in tasks)
    line.nothing_is_left()


async def test_blocks_that_were_promised_are_room_that_is_gone():
    line = Line()
    line.fleet.join("d", max_num_sequences=99, num_blocks=16)
    tasks = [line.start(f"r{n}", num_prompt_tokens=4, max_tokens=26) for n in range(3)]
    await settle()
    assert line.inside == ["r0", "r1"]
    line.end("r0")
    await settle()
    assert line.inside == ["r1", "r2"]
    for request_id in ("r1", "r2"):
        line.end(request_id)
    await asyncio.gather(*tasks)
    line.nothing_is_left()


async def test_a_small_request_may_pass_a_large_one_for_a_while_and_then_may_not():
    line = Line()
    line.fleet.join("d", max_num_sequences=99, num_blocks=16)
    tasks = [
        line.start("half", num_prompt_tokens=4, max_tokens=30),
        line.start("whole", num_prompt_tokens=4, max_tokens=60),
        line.start("small", num_prompt_tokens=4, max_tokens=6),
    ]
    await settle()
    assert line.inside == ["half", "small"]
    line.clock.advance(2.5)
    tasks.append(line.start("late", num_prompt_tokens=4, max_tokens=6))
    await settle()
    assert line.inside == ["half", "small"]
    for request_id in ("half", "small", "whole", "late"):
        await until(lambda request_id=request_id: request_id in line.inside)
        line.end(request_id)
    await asyncio.gather(*tasks)
    line.nothing_is_left()


async def test_a_client_with_many_requests_does_not_keep_another_ones_out(line):
    line = Line()
    line.fleet.join("d", max_num_sequences=1, num_blocks=10**4)
    tasks = [line.start(f"many{number}", client="many") for number in range(100)]
    await settle()
    tasks.append(line.start("single", client="single"))
    await settle()
    for _ in range(2):
        line.end(line.inside[0])
        await settle()
    assert "single" in line.inside
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    line.nothing_is_left()


async def test_who_waits_too_long_is_refused_and_told_when_to_come_again(line):
    tasks = [line.start(f"r{number}") for number in range(5)]
    with pytest.raises(Overloaded, match="no room within 0.03 s: no decode slot") as caught:
        await tasks[4]
    assert caught.value.retry_after_s == 1.0
    for number in range(4):
        line.end(f"r{number}")
    await asyncio.gather(*tasks[:4])
    line.nothing_is_left()


async def test_a_line_that_is_full_takes_nobody_but_whom_there_is_room_for():
    line = Line(max_queued_requests=1)
    line.fleet.join("d", max_num_sequences=1, num_blocks=1000)
    tasks = [line.start(f"r{number}") for number in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="1 requests wait in line"):
        await line.start("one too many")
    for number in range(3):
        await until(lambda number=number: f"r{number}" in line.inside)
        line.end(f"r{number}")
    await asyncio.gather(*tasks)
    line.nothing_is_left()


async def test_an_answer_of_which_its_client_has_tokens_waits_behind_the_line_but_is_not_refused():
    line = Line(max_queued_requests=1)
    line.fleet.join("d", max_num_sequences=1, num_blocks=1000)
    tasks = [line.start(f"r{number}") for number in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="1 requests wait in line"):
        await line.start("nothing yet", resumption=Resumption(()))
    tasks.append(line.start("begun", resumption=Resumption((1, 2))))
    for request_id in ("r0", "r1", "r2", "begun"):
        await until(lambda request_id=request_id: request_id in line.inside)
        line.end(request_id)
    await asyncio.gather(*tasks)
    line.nothing_is_left()


async def test_a_request_without_a_line_is_let_in_while_there_is_room():
    line = Line(max_queued_requests=0)
    line.fleet.join("d", max_num_sequences=1, num_blocks=1000)
    task = line.start()
    await settle()
    line.end("r")
    assert (await task).decode == "d"


@pytest.mark.parametrize("is_steady", [True, False])
async def test_a_deadline_that_measured_rates_say_is_lost_is_refused_at_once(
    line, is_steady, monkeypatch
):
    if is_steady:
        monkeypatch.setattr(rates, "NUM_STEADY_ANSWERS", 1)
    tasks = [line.start(f"r{number}") for number in range(3)]
    await settle()
    lease, _ = line.leases["r0"]
    line.clock.advance(2.0)
    # Two tokens in two seconds; the other two prompts have twelve.
    line.placing.knowledge.hear(lease, token(0, prefill=PREFILL_REPORT), line.clock.now_s())
    line.placing.knowledge.hear(lease, token(1, done=DONE), line.clock.now_s())
    now_s = line.clock.now_s()
    late = line.start("late", deadline_s=now_s + 1.0)
    if is_steady:
        with pytest.raises(Overloaded, match="of work are ahead of it") as caught:
            await late
        assert 1.0 < caught.value.retry_after_s < 60.0
        tasks.append(line.start("in time", deadline_s=now_s + 60.0))
        await settle()
        assert "in time" in line.inside
    else:
        # The first answers are slow and small: nobody is refused for what they say.
        await settle()
        assert "late" in line.inside
        tasks.append(late)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    line.nothing_is_left()


async def test_a_request_that_a_worker_failed_goes_before_all_that_are_new(line):
    line = Line()
    line.fleet.join("d", max_num_sequences=1, num_blocks=1000)
    tasks = [line.start(f"r{n}", priority=Priority.HIGH) for n in range(4)]
    recovery = Recovery(OnFailure.RESUME, 4, last_error=PeerLost("x", "killed"))
    done = asyncio.Event()
    tasks.append(asyncio.create_task(line.run(make_request("resumed"), recovery, done)))
    await settle()
    line.end("r0")
    await settle()
    assert line.inside == ["r1", "resumed"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    line.nothing_is_left()


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_whom_all_failed_that_are_there_waits_only_for_a_worker_that_is_looked_for(
    is_awaited,
):
    line = Line(max_wait_s=5.0)
    line.fleet.join("d0", max_num_sequences=1, num_blocks=1000)
    line.fleet.is_incomplete = is_awaited
    failed = TwophaseError("the decode step failed: no memory")
    recovery = Recovery(OnFailure.RESUME, 4, last_error=failed, _avoided={"d0-life"})
    async with line.watched():
        done = asyncio.Event()
        task = asyncio.create_task(line.run(make_request("r"), recovery, done))
        await settle()
        if is_awaited:
            line.fleet.join("d1", max_num_sequences=1, num_blocks=1000)
            await until(lambda: "r" in line.inside)
            done.set()
            assert (await task).decode == "d1"
        else:
            with pytest.raises(TwophaseError, match="no memory"):
                await task
    line.nothing_is_left()


async def test_a_worker_that_comes_takes_whom_it_has_room_for():
    line = Line()
    line.fleet.join("d0", max_num_sequences=1, num_blocks=1000)
    async with line.watched():
        tasks = [line.start(f"r{number}") for number in range(4)]
        await settle()
        assert len(line.inside) == 2
        line.fleet.join("d1", max_num_sequences=1, num_blocks=1000)
        await settle()
        assert len(line.inside) == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    line.nothing_is_left()


async def test_while_there_is_nobody_a_request_waits_less_than_for_room():
    line = Line(max_wait_s=SOON_S)
    line.fleet.join("d", max_num_sequences=1, num_blocks=1000)
    async with line.watched():
        tasks = [line.start(f"r{number}") for number in range(3)]
        await settle()
        line.fleet.leave("d")
        with pytest.raises(PeerLost, match="no decode worker can be used"):
            await tasks[2]
        for number in range(2):
            line.end(f"r{number}")
        await asyncio.gather(*tasks[:2])
    line.nothing_is_left()


async def test_what_no_worker_can_hold_is_a_mistake_and_what_one_could_is_bad_luck():
    line = Line(Mode.DISAGGREGATED, on_failure=OnFailure.FAIL)
    line.fleet.join("p", Role.PREFILL)
    line.fleet.join("small", num_blocks=4)
    line.fleet.join("large")
    with pytest.raises(InvalidRequest, match="the largest decode worker holds 64"):
        await line.start(num_prompt_tokens=6, max_tokens=59)
    usable = line.fleet.decode_loads()[:1]
    line.fleet.decode_loads = lambda: usable
    with pytest.raises(PeerLost, match="the largest decode worker holds 16"):
        await line.start(num_prompt_tokens=6, max_tokens=58)
    line.nothing_is_left()


async def test_a_prompt_goes_where_its_blocks_are_and_an_answer_adds_to_them():
    line = Line(Mode.DISAGGREGATED)
    for number in range(2):
        line.fleet.join(f"d{number}")
        line.fleet.join(f"p{number}", Role.PREFILL)
    busy, first = line.start("busy", num_prompt_tokens=1), line.start("first", num_prompt_tokens=9)
    await settle()
    line.answers["first"].log += [9, 10, 11]
    for name in ("first", "busy"):
        line.end(name)
    placement = await first
    assert (placement.prefill, placement.decode) == ("p1", "d1")
    again = line.start("again", num_prompt_tokens=13)
    await settle()
    line.end("again")
    assert (await again).why == (
        "p1 has 0 prompt tokens to read, 8 of this prompt cached; "
        "d1 has 0 of 4 sequences, 12 tokens cached"
    )
    await busy
    line.nothing_is_left()


async def test_what_workers_report_ends_their_load_and_tells_how_fast_they_are():
    line = Line(Mode.DISAGGREGATED)
    line.fleet.join("p", Role.PREFILL)
    line.fleet.join("d")
    task = line.start(num_prompt_tokens=24)
    await settle()
    lease, _ = line.leases["r"]
    knowledge = line.placing.knowledge
    assert knowledge.ledger.num_prompt_tokens("p-life") == 24
    assert knowledge.ledger.num_all_bytes == 6 * LAYOUT.block_bytes
    for event in (FirstToken(100, FIRST.report), TRANSFER_REPORT, token(1, done=DONE)):
        knowledge.hear(lease, event, 1001.0)
    assert knowledge.ledger.num_prompt_tokens("p-life") == knowledge.ledger.num_all_bytes == 0
    assert knowledge.rates.prefill_tokens_per_s("p-life") == (24 - 4) / 2.0
    assert knowledge.rates.link_bytes_per_s() == pytest.approx(512 / 0.75)
    assert knowledge.rates.exposed_transfer_s() == 0.25
    assert knowledge.rates.decode_s() == 2.0
    line.end("r")
    await task
    line.nothing_is_left()


async def test_a_session_stays_at_its_worker():
    line = Line()
    for number in range(2):
        line.fleet.join(f"d{number}")
    busy = line.start("busy", num_prompt_tokens=3)
    await settle()
    for turn, prompt in enumerate((3, 2, 1)):
        task = line.start(f"turn{turn}", session="s", num_prompt_tokens=prompt)
        await settle()
        if turn == 0:
            line.end("busy")
            await busy
        line.end(f"turn{turn}")
        assert (await task).decode == "d1"


acts = st.lists(
    st.tuples(
        st.sampled_from(["start", "end", "cancel", "join", "leave", "late"]), st.integers(0, 9)
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(acts)
def test_whatever_happens_bounds_hold_and_nothing_is_left(steps):
    asyncio.run(live_through(steps))


async def live_through(steps):
    line = Line(max_queued_requests=5, max_wait_s=SOON_S)
    line.fleet.join("d0", max_num_sequences=1, num_blocks=16)
    tasks = []
    async with line.watched():
        for act, number in steps:
            step(line, tasks, act, number)
            if number % 2:
                await settle()
            assert line.placing.num_waiting <= 5
            assert len(line.inside) <= 2 + 4 * line.num_joined
        line.fleet.join("last", max_num_sequences=2, num_blocks=16)
        while not all(task.done() for task in tasks):
            await settle()
            for request_id in list(line.inside):
                line.end(request_id)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    allowed = (Overloaded, PeerLost, asyncio.CancelledError)
    assert all(not isinstance(r, BaseException) or isinstance(r, allowed) for r in results)
    line.nothing_is_left()


def step(line, tasks, act, number):
    match act:
        case "start":
            sizes = {"num_prompt_tokens": number + 1, "max_tokens": 3 * number + 1}
            tasks.append(line.start(f"r{len(tasks)}", client=str(number % 3), **sizes))
        case "end" if line.inside:
            line.end(line.inside[number % len(line.inside)])
        case "cancel" if tasks:
            tasks[number % len(tasks)].cancel()
        case "join":
            line.num_joined += 1
            line.fleet.join(f"d{line.num_joined}", max_num_sequences=2, num_blocks=16)
        case "leave":
            line.fleet.leave(f"d{number}")
        case "late":
            line.clock.advance(float(number))
