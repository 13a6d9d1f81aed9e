"""Every fault at every step of a handoff, through both machines: right tokens, or a clear error.

Each row orders one fault in a running cluster, where workers, router, streams and backend are the
real ones. What the client got is then all of the right tokens, or a beginning of them and an
error; within seconds nothing is left; and soon requests are right again, whatever became of the
link. (Bytes and headers that got out of step show with the second wrong piece.)
"""

import asyncio

import pytest

from bench.parity import wait_until_ready
from core.errors import DeadlineExceeded, PeerLost, TransferFailed, TwophaseError
from kv_transfer import inbound
from tests.cases.one_process import one_process, prompt_of, until
from tests.contract.faulty import Fault, FaultKind, Step

LATE_S = 0.03
NUM_PROMPT_TOKENS, NUM_TOKENS = 40, 3
MIDDLE = 5  # of twelve pieces: four layers of three blocks
SETUP = ("transfer.piece=4096", "transfer.connect_timeout_s=1.5")

SLEEP, DELAY, RAISE = FaultKind.SLEEP, FaultKind.DELAY, FaultKind.RAISE
DROP, DUPLICATE, CORRUPT = FaultKind.DROP, FaultKind.DUPLICATE, FaultKind.CORRUPT
RIGHT, FAILS, EITHER = "right", "fails", "either"

IN_TIME = {SLEEP: RIGHT, DELAY: RIGHT}
TO_BYTES = {
    Step.CONNECT: IN_TIME | {RAISE: FAILS},
    Step.ACCEPT: IN_TIME | {RAISE: FAILS},
    # Twice is harmless where bytes have their place; in a pipe all that follow are displaced.
    Step.SEND: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: EITHER, CORRUPT: FAILS},
    Step.TAKE: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: EITHER, CORRUPT: FAILS},
    Step.ACKNOWLEDGE: IN_TIME | {DROP: RIGHT, DUPLICATE: RIGHT},
    Step.CLOSE: IN_TIME | {DUPLICATE: RIGHT},
}
TO_MESSAGES = {
    Step.OPEN_LINK: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: RIGHT},
    Step.LINK_OPENED: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: RIGHT},
    Step.BEGIN: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: FAILS},
    Step.GRANTED: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: RIGHT},
    Step.PIECE: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: FAILS, CORRUPT: FAILS},
    Step.PIECE_ACK: IN_TIME | {RAISE: FAILS, DROP: RIGHT, DUPLICATE: RIGHT},
    Step.SEAL: IN_TIME | {RAISE: FAILS, DROP: FAILS, DUPLICATE: RIGHT},
    # Decode has it all and goes on; only prefill does not hear of it.
    Step.SEALED: IN_TIME | {RAISE: EITHER, DROP: EITHER, DUPLICATE: RIGHT},
    Step.TRANSFER_REFUSED: dict.fromkeys((SLEEP, DELAY, RAISE, DROP, DUPLICATE), FAILS),
    Step.ABORT: dict.fromkeys((SLEEP, DELAY, RAISE, DROP, DUPLICATE), FAILS),
    Step.ABORT_ACK: dict.fromkeys((SLEEP, DELAY, RAISE, DROP, DUPLICATE), FAILS),
}
OF_A_NEW_LINK = (Step.OPEN_LINK, Step.LINK_OPENED, Step.CONNECT, Step.ACCEPT, Step.CLOSE)
OF_EACH_PIECE = (Step.SEND, Step.TAKE, Step.ACKNOWLEDGE, Step.PIECE, Step.PIECE_ACK)
OF_AN_ABORT = (Step.ABORT, Step.ABORT_ACK)
A_LAYER_IS_MISSING = (Fault(Step.SEND, DROP, MIDDLE), Fault(Step.PIECE, DROP, MIDDLE))

pytestmark = [pytest.mark.case("B-171"), pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def short_fence(monkeypatch):
    """An Abort that is not answered ends the link sooner than in a product."""
    monkeypatch.setattr(inbound, "FENCE_TIMEOUT_S", 0.3)


async def strike(cluster, step, kind, prompt, timeout_s=20.0):
    """One request during which the fault happens, and what its client got."""
    fault = Fault(step, kind, MIDDLE if step in OF_EACH_PIECE else 0, LATE_S)
    if step in OF_AN_ABORT:
        cluster.faults.order(fault, Fault(Step.SEND, SLEEP, MIDDLE, LATE_S))
        asked = asyncio.create_task(cluster.ask(prompt, max_tokens=NUM_TOKENS))
        await until(lambda: cluster.faults.num_struck)
        asked.cancel()
        await until(lambda: cluster.faults.num_struck == 2)
        return None
    if step in OF_A_NEW_LINK:
        cluster.faults.order(fault)
        cluster.break_links()
        await until(lambda: cluster.num_open_senders == 0)
    elif step is Step.TRANSFER_REFUSED:
        cluster.faults.order(fault, *A_LAYER_IS_MISSING)
    else:
        cluster.faults.order(fault)
    answer = await cluster.ask(prompt, max_tokens=NUM_TOKENS, timeout_s=timeout_s)
    assert cluster.faults.num_struck > 0
    return answer


def check(answer, outcome, right):
    """What the client got is the right answer, or a beginning of it and an error."""
    if answer.error is None:
        assert outcome in (RIGHT, EITHER)
        assert answer.token_ids == right
    else:
        assert outcome in (FAILS, EITHER), answer.error
        assert isinstance(answer.error, TransferFailed | PeerLost | DeadlineExceeded)
        assert answer.token_ids == right[: len(answer.token_ids)]


async def require_mended(cluster, prompt, right):
    """The next request is right; at worst it and a probe each meet one more wrong piece."""
    cluster.faults.order()
    answers = []
    while not answers or answers[-1].error is not None:
        assert len(answers) < 3, answers
        await wait_until_ready(cluster.client)
        answers.append(await cluster.ask(prompt, max_tokens=NUM_TOKENS))
        check(answers[-1], EITHER, right)
    await cluster.nothing_is_left()


async def play(model, reference, backend, step, outcomes):
    async with one_process(model, backend, *SETUP) as cluster:
        for number, (kind, outcome) in enumerate(outcomes.items()):
            prompt = prompt_of(NUM_PROMPT_TOKENS, number)
            right = reference(prompt, NUM_TOKENS)
            # What is lost for good waits for the deadline, unless it is a link that is not made.
            is_lost = kind in (DROP, DUPLICATE) and step not in OF_A_NEW_LINK
            limit = {"timeout_s": 0.8} if is_lost and outcome != RIGHT else {}
            answer = await strike(cluster, step, kind, prompt, **limit)
            if answer is not None:
                check(answer, outcome, right)
            await cluster.nothing_is_left()
            await require_mended(cluster, prompt, right)


@pytest.mark.case("B-001")
async def test_a_writer_that_answers_no_abort_loses_its_link_and_is_told(model, reference, backend):
    prompt = prompt_of(NUM_PROMPT_TOKENS, 0)
    async with one_process(model, backend, *SETUP) as cluster:
        silent = [Fault(step, DROP, nth=None) for step in OF_AN_ABORT]
        cluster.faults.order(*silent, Fault(Step.SEND, SLEEP, MIDDLE, LATE_S))
        asked = asyncio.create_task(cluster.ask(prompt, max_tokens=NUM_TOKENS))
        await until(lambda: cluster.faults.num_struck)
        asked.cancel()
        await cluster.nothing_is_left()
        cluster.faults.order()
        # prefill has closed its end, so this request goes over a new link and waits for nobody
        answer = await cluster.ask(prompt, max_tokens=NUM_TOKENS, timeout_s=10.0)
        assert answer.token_ids == reference(prompt, NUM_TOKENS)
        await cluster.nothing_is_left()


def test_every_fault_that_can_be_is_in_the_matrix():
    rows = {
        (step, kind) for table in (TO_BYTES, TO_MESSAGES) for step in table for kind in table[step]
    }
    missing = set()
    for step in Step:
        for kind in FaultKind:
            try:
                Fault(step, kind)
            except ValueError:
                continue
            missing |= {(step, kind)} - rows
    # Our own call on our own socket: only a bug loses it, and then nothing may free the blocks.
    assert missing - {(Step.CLOSE, DROP)} == {(Step.LINK_REFUSED, kind) for kind in REFUSALS}


@pytest.mark.parametrize("step", TO_BYTES)
async def test_a_fault_at_the_bytes(model, reference, backend, step):
    await play(model, reference, backend, step, TO_BYTES[step])


@pytest.mark.case("B-063")
@pytest.mark.parametrize("step", TO_MESSAGES)
async def test_a_fault_at_the_messages(model, reference, step):
    # A backend sees no message but by the bytes that follow it: one stands for all.
    await play(model, reference, "shm", step, TO_MESSAGES[step])


REFUSALS = (SLEEP, DELAY, RAISE, DROP, DUPLICATE)


@pytest.mark.case("B-163")
@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_link_that_is_refused_is_an_error_in_time_however_it_is_said(model, kind):
    setting = "transfer.backend=torch"
    async with one_process(model, "shm", *SETUP, only_at_prefill=setting) as cluster:
        async with asyncio.timeout(20):
            while len((await cluster.client.status()).workers) < 2:
                await asyncio.sleep(0.01)
        cluster.faults.order(Fault(Step.LINK_REFUSED, kind, None, LATE_S))
        answer = await cluster.ask(prompt_of(8, 0), max_tokens=NUM_TOKENS, timeout_s=20.0)
        assert isinstance(answer.error, TwophaseError)
        assert not isinstance(answer.error, DeadlineExceeded)
        assert answer.token_ids == []
        await cluster.nothing_is_left()


@pytest.mark.case("B-058")
@pytest.mark.parametrize("step", [Step.SEND, Step.PIECE])
async def test_thirty_layers_of_which_any_is_lost_doubled_or_changed_give_no_wrong_token(
    deep_model, deep_reference, backend, step
):
    async with one_process(deep_model, backend, *SETUP) as cluster:
        prompt, right = prompt_of(12, 30), deep_reference(prompt_of(12, 30), NUM_TOKENS)
        for kind in (DROP, DUPLICATE, CORRUPT):
            for layer in (0, 29):
                cluster.faults.order(Fault(step, kind, layer))
                answer = await cluster.ask(prompt, max_tokens=NUM_TOKENS, timeout_s=2.0)
                assert cluster.faults.num_struck == 1
                check(answer, EITHER, right)
                assert answer.error or (step, kind) == (Step.SEND, DUPLICATE)
                await cluster.nothing_is_left()
                await require_mended(cluster, prompt, right)
