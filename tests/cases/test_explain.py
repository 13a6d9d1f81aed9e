"""A delay in one phase is named by that phase, in a running cluster; all is well without one."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest

import core.diagnosis
import router.generation
from core.events.event import EventKind
from core.worker import Reserve
from router.generation import Generation
from router.members.member import DecodeMember
from router.placing.line import Placing
from tests.cases.one_process import prompt_of
from tests.contract.faulty import Fault, FaultKind, Step

DELAY_S = 1.2
NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that is busy with other tests delays everything a little."""
    monkeypatch.setattr(core.diagnosis, "MIN_WAIT_S", 0.8)


async def ask(cluster, number, max_tokens=NUM_TOKENS):
    """The answer's own record, and the seconds that its client waited."""
    began_s = time.monotonic()
    answer = await cluster.ask(prompt_of(20, number), max_tokens=max_tokens)
    assert answer.error is None
    return answer.completion, time.monotonic() - began_s


@contextlib.contextmanager
def tokenizing(cluster, patch):
    whole = router.generation.token_ids_of

    def late(*arguments):
        time.sleep(DELAY_S)
        return whole(*arguments)

    patch.setattr(router.generation, "token_ids_of", late)
    yield


@contextlib.contextmanager
def placing(cluster, patch):
    whole = Placing.placed

    @contextlib.asynccontextmanager
    async def late(*arguments):
        await asyncio.sleep(DELAY_S)
        async with whole(*arguments) as lease:
            yield lease

    patch.setattr(Placing, "placed", late)
    yield


@contextlib.contextmanager
def reserving(cluster, patch):
    send = DecodeMember.send

    def late(member, command):
        delay_s = DELAY_S if isinstance(command, Reserve) else 0.0
        asyncio.get_running_loop().call_later(delay_s, send, member, command)

    patch.setattr(DecodeMember, "send", late)
    yield


@contextlib.contextmanager
def queueing(cluster, patch):
    with held_for_a_while(cluster.devices["prefill-0"]):
        yield


@contextlib.contextmanager
def prefilling(cluster, patch):
    device = cluster.devices["prefill-0"]
    step = device._step

    def late(*arguments):
        time.sleep(DELAY_S)
        result = step(*arguments)
        return replace(result, compute_s=result.compute_s + DELAY_S)

    patch.setattr(device, "_step", late)
    yield


@contextlib.contextmanager
def transferring(cluster, patch):
    cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, seconds=DELAY_S))
    yield
    cluster.faults.order()


@contextlib.contextmanager
def decoding(cluster, patch):
    """One step in the middle of the answer takes long."""
    device = cluster.devices["decode-0"]
    step = device._step
    num_steps = 0

    def late(*arguments):
        nonlocal num_steps
        num_steps += 1
        delay_s = DELAY_S if num_steps == NUM_TOKENS // 2 else 0.0
        time.sleep(delay_s)
        result = step(*arguments)
        return replace(result, compute_s=result.compute_s + delay_s)

    patch.setattr(device, "_step", late)
    yield


@contextlib.contextmanager
def recovering(cluster, patch):
    late = Fault(Step.SEND, FaultKind.SLEEP, seconds=DELAY_S)
    cluster.faults.order(late, Fault(Step.PIECE, FaultKind.CORRUPT))
    yield
    cluster.faults.order()


@contextlib.contextmanager
def delivering(cluster, patch):
    run = Generation.run

    async def late(generation, incoming, deliver):
        async def deliver_late(delivery):
            if delivery.chunks[-1].completion is None:
                num_delivered.append(len(delivery.chunks))
                if sum(num_delivered) == NUM_TOKENS:
                    await asyncio.sleep(DELAY_S)
            await deliver(delivery)

        num_delivered = []
        return await run(generation, incoming, deliver_late)

    patch.setattr(Generation, "run", late)
    yield


@contextlib.contextmanager
def held_for_a_while(device):
    """No step of the device begins for a while from now."""
    stack = contextlib.ExitStack()
    stack.enter_context(device.held())
    asyncio.get_running_loop().call_later(DELAY_S, stack.close)
    yield


DELAYS = {
    "tokenize": tokenizing,
    "place": placing,
    "reserve": reserving,
    "queue": queueing,
    "prefill": prefilling,
    "exposed_transfer": transferring,
    "decode": decoding,
    "recovery": recovering,
    "delivery": delivering,
}


async def phases_named(cluster, completion):
    explained = await cluster.client.admin.explain(completion.request_id)
    assert explained.completion == completion
    return [finding.phase for finding in explained.findings]


# The event that is as long as a phase.
SHOWN = {
    "tokenize": EventKind.TOKENIZE,
    "place": EventKind.LINE,
    "reserve": EventKind.RESERVE,
    "queue": EventKind.QUEUE,
    "prefill": EventKind.CHUNK,
    "exposed_transfer": EventKind.TRANSFER,
    "decode": EventKind.GAP,
    "recovery": EventKind.FAILED,
    "delivery": EventKind.LAST_TOKEN,
}


async def timeline_shows(cluster, completion, phase):
    """The delay is in one event, whose place in time is within the request's."""
    timeline = await cluster.client.admin.timeline(completion.request_id)
    assert timeline.completion == completion
    longest = max(
        (e for e in timeline.events if e.kind is SHOWN[phase]), key=lambda e: e.duration_s
    )
    assert 0.9 * DELAY_S < longest.duration_s < completion.phases.total_s
    received, *_, end = timeline.events
    assert received.begin_s <= longest.begin_s <= longest.end_s <= end.end_s


@pytest.mark.case("B-119")
async def test_the_phase_that_was_delayed_is_named_and_no_other(run):
    longer = []
    async with run("shm", "router.on_failure=resume") as cluster:
        for number in range(8):
            completion, _ = await ask(cluster, number)
        assert await phases_named(cluster, completion) == []
        for number, (phase, delayed) in enumerate(DELAYS.items(), start=100):
            with pytest.MonkeyPatch.context() as patch, delayed(cluster, patch):
                completion, client_s = await ask(cluster, number)
            assert await phases_named(cluster, completion) == [phase]
            # what the client waited longer is its own part of the way
            longer_s = client_s - completion.phases.total_s
            assert 0 <= longer_s < 0.3
            longer.append(longer_s / client_s)
            await timeline_shows(cluster, completion, phase)
            healthy, _ = await ask(cluster, 1000 + number)
            assert await phases_named(cluster, healthy) == []
        # Client and servers share one event loop, and the machine with other tests: that only adds
        # to what the client waits, so the least held up shows how well the two clocks agree.
        assert min(longer) < 0.02
        diagnosis = await cluster.client.admin.diagnose(60.0)
        assert {trouble.worst.phase for trouble in diagnosis.troubles} == set(DELAYS)
        assert diagnosis.num_requests == 8 + 2 * len(DELAYS)
        await cluster.nothing_is_left()


async def test_a_wait_for_the_next_step_is_told_from_a_step_that_took_long(run):
    async with run("shm") as cluster:
        device = cluster.devices["decode-0"]
        running = asyncio.create_task(ask(cluster, 1, max_tokens=400))
        await cluster.until_count("decode-0", "num_running_requests", bool)
        with held_for_a_while(device):
            waited, _ = await ask(cluster, 2)
        interrupted, _ = await running
        assert await phases_named(cluster, waited) == ["slot_wait"]
        assert await phases_named(cluster, interrupted) == ["decode"]
        gap = interrupted.decode.longest_gap
        assert gap.gap_s > DELAY_S / 2 > gap.step_s
        await cluster.nothing_is_left()


async def test_a_long_gap_names_the_request_whose_prompt_was_read_in_it(run):
    async with run("shm", "router.on_failure=resume") as cluster:
        device = cluster.devices["decode-0"]
        step = device._step

        def prompts_take_long(steps, on_layer=None):
            began_s = time.monotonic()
            if any(share.end - share.start > 1 for share in steps):
                time.sleep(DELAY_S)
            result = step(steps, on_layer)
            return replace(result, compute_s=time.monotonic() - began_s)

        running = asyncio.create_task(ask(cluster, 1, max_tokens=200))
        await cluster.until_count("decode-0", "num_running_requests", bool)
        device._step = prompts_take_long
        # its KV cache does not come, so decode reads the prompt between the other's tokens
        cluster.faults.order(Fault(Step.SEND, FaultKind.RAISE))
        prompt, _ = await ask(cluster, 2)
        interrupted, _ = await running
        assert await phases_named(cluster, interrupted) == ["decode"]
        gap = interrupted.decode.longest_gap
        assert gap.prompts == (prompt.request_id,)
        assert gap.num_prompt_tokens in (20, 21)  # the token that prefill had made is read too
        assert gap.step_s >= DELAY_S
        await cluster.nothing_is_left()
