"""n answers to one prompt: it is prefilled once, and each answer is as if asked for alone."""

import asyncio
from contextlib import aclosing

import pytest

from core.errors import Cancelled, InvalidRequest, Overloaded, TransferFailed, TwophaseError
from core.request import SamplingParams, derived_seed
from tests.cases.one_process import prompt_of
from tests.contract.faulty import Fault, FaultKind, Step
from twophase.client import Sampling

BLOCK_SIZE = 16
PROMPT = prompt_of(75, 45)
NO_END = {"ignore_eos": True}


def drawn(reference, index, max_tokens, *, seed):
    """What the answer of this index is when it is asked for alone."""
    seed = derived_seed(seed, index) if index else seed
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed)
    return reference(PROMPT, max_tokens, params)


async def answers_of(cluster, prompt, **sampling):
    """Token ids and Completion of each answer of a stream, by index."""
    token_ids, completions = {}, {}
    async for chunk in cluster.client.generate(prompt, Sampling(**NO_END, **sampling)):
        token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        if chunk.completion is not None:
            assert chunk.index not in completions
            completions[chunk.index] = chunk.completion
    assert sorted(token_ids) == sorted(completions)
    return [token_ids[i] for i in sorted(token_ids)], [completions[i] for i in sorted(completions)]


@pytest.mark.case("B-045")
async def test_each_answer_has_its_own_tokens_and_the_prompt_is_prefilled_once(run, reference):
    setup = ("router.http_port=0", "router.max_n=4", "router.max_active_requests=5")
    async with run("shm", *setup) as cluster:
        prefill, decode = cluster.devices["prefill-0"], cluster.devices["decode-0"]
        num_read, num_decoded = prefill.num_tokens, decode.num_tokens
        # 1 seeded, streamed: four different answers, each as if asked for alone
        sampling = {"max_tokens": 20, "temperature": 0.8, "seed": 7, "n": 4}
        streamed, completions = await answers_of(cluster, PROMPT, **sampling)
        assert streamed == [drawn(reference, index, 20, seed=7) for index in range(4)]
        assert len({tuple(token_ids) for token_ids in streamed}) == 4
        assert len({completion.request_id for completion in completions}) == 1
        # 2 prefill read the prompt once; the others read their last, partial block at decode
        assert prefill.num_tokens - num_read == len(PROMPT)
        num_partial = len(PROMPT) % BLOCK_SIZE
        # Of 20 tokens decode computes the KV of all but the last; the first is of the prompt.
        assert decode.num_tokens - num_decoded == 3 * num_partial + 4 * 19
        usages = [completion.usage for completion in completions]
        assert usages[0].num_transferred_tokens == len(PROMPT)
        assert [usage.num_local_prefill_tokens for usage in usages] == [0, *[num_partial] * 3]
        first, *others = [completion.phases for completion in completions]
        assert all(phases.place_s > first.prefill_s for phases in others)
        assert all(abs(phases.unaccounted_s) < 0.1 for phases in others)
        # 3 whole, greedy: equal answers
        whole = await cluster.client.generate_all(PROMPT, Sampling(max_tokens=9, n=3, **NO_END))
        assert [answer.index for answer in whole] == [0, 1, 2]
        assert all([*answer.token_ids] == reference(PROMPT, 9) for answer in whole)
        # 4 one token each: the answer is over before decode has anything
        ones, _ = await answers_of(
            cluster, PROMPT, **(sampling | {"max_tokens": 1, "temperature": 0.8})
        )
        assert ones == [drawn(reference, index, 1, seed=7) for index in range(4)]
        # 5 over HTTP: choices by index, usage with the prompt once
        message = {"prompt": PROMPT, **sampling, "ignore_eos": True, "return_token_ids": True}
        reply = (await cluster.post("completions", **message)).json()
        assert [choice["token_ids"] for choice in reply["choices"]] == streamed
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (75, 80)
        # 6 more than are allowed, and none, are refused by name; more than fit now, for a while
        for count in (5, 0):
            with pytest.raises(InvalidRequest, match="must be 1 to 4") as refused:
                await answers_of(cluster, PROMPT, n=count)
            assert refused.value.field == "n"
        refusal = await cluster.post("chat/completions", messages=[], n=-1)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "n")
        await cluster.nothing_is_left()


async def test_all_end_together_when_cancelled_and_when_one_fails(run):
    async with run("shm", "router.max_active_requests=5") as cluster:
        many = {"max_tokens": 900, "temperature": 0.8, "n": 4}
        # 1 while all decode they count as four, and one cancel ends them
        asked = asyncio.create_task(
            cluster.client.generate_all(PROMPT, Sampling(**NO_END, **many), request_id="four")
        )
        await cluster.until_count("decode-0", "num_running_requests", lambda count: count == 4)
        with pytest.raises(Overloaded, match="4 of 5 answers"):
            await cluster.client.generate_all(PROMPT, Sampling(n=2))
        [listed] = await cluster.client.admin.requests()
        assert listed.request_id == "four" and listed.num_output_tokens >= 4
        assert await cluster.client.cancel("four")
        with pytest.raises(Cancelled) as cancelled:
            await asked
        assert cancelled.value.completion.usage.num_output_tokens >= 4
        await cluster.nothing_is_left()
        # 2 a client that goes away is a cancel, too
        async with aclosing(cluster.client.generate(PROMPT, Sampling(**NO_END, **many))) as stream:
            async for chunk in stream:
                if chunk.index == 3:
                    break
        await cluster.nothing_is_left()
        # 3 the handoff of the first fails: none of the others begins
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        with pytest.raises(TransferFailed) as failed:
            await cluster.client.generate_all(prompt_of(75, 46), Sampling(**NO_END, **many))
        assert failed.value.completion.usage.num_output_tokens <= 1
        await cluster.nothing_is_left()
        # 4 a step of decode fails: the request has one error, and what was sent is counted
        asked = asyncio.create_task(cluster.client.generate_all(PROMPT, Sampling(**NO_END, **many)))
        await cluster.until_count("decode-0", "num_running_requests", lambda count: count == 4)
        fail_next_step(cluster.devices["decode-0"])
        with pytest.raises(TwophaseError, match="the decode step failed") as failed:
            await asked
        assert failed.value.completion.usage.num_output_tokens >= 4
        await cluster.nothing_is_left()


async def test_each_answer_goes_on_elsewhere_when_its_worker_fails(run, reference):
    setup = ("router.on_failure=resume", "decode.replicas=2")
    async with run("shm", *setup) as cluster:
        sampling = {"max_tokens": 60, "temperature": 0.8, "seed": 8, "n": 3}
        asked = asyncio.create_task(answers_of(cluster, PROMPT, **sampling))
        async with asyncio.timeout(10):
            while not (busy := await fullest(cluster)):
                await asyncio.sleep(0.002)
        fail_next_step(cluster.devices[busy])
        token_ids, completions = await asked
        assert token_ids == [drawn(reference, index, 60, seed=8) for index in range(3)]
        assert [len(completion.failures) for completion in completions] == [1, 1, 1]
        assert {completion.decode_worker for completion in completions}.isdisjoint({busy})
        await cluster.nothing_is_left()


def fail_next_step(device):
    """Have the next step of a worker's engine raise, and no other."""
    step = device._step

    def fail(*arguments):
        device._step = step
        raise RuntimeError("a test")

    device._step = fail


async def fullest(cluster):
    """The decode worker that runs all three answers; None before."""
    statuses = await cluster.statuses()
    return next((n for n, s in statuses.items() if s.num_running_requests == 3), None)
