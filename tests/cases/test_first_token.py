"""The first token is prefill's, the others are decode's: none too many, none drawn twice."""

import asyncio

import pytest

from core.errors import InvalidRequest, TransferFailed
from core.request import SamplingParams
from engine.batch import SequenceStep
from tests.cases.one_process import one_process, prompt_of
from tests.contract.faulty import Fault, FaultKind, Step
from tests.tiny_model import IM_END_ID
from twophase.client import Sampling
from twophase.v1 import inference_pb2

PROMPT = prompt_of(40, 4)
NO_END = {str(IM_END_ID): -100}


def prompt_that_ends_at_once(runner):
    """A prompt after which the greedy token is the end of the sequence."""
    num_blocks = runner.num_blocks
    for first in range(0, 8192, num_blocks):
        prompts = [prompt_of(5, -first - i) for i in range(num_blocks)]
        steps = [SequenceStep(p, 0, [i], SamplingParams()) for i, p in enumerate(prompts)]
        for prompt, token_id in zip(prompts, runner.step(steps).token_ids, strict=True):
            if token_id == IM_END_ID:
                return prompt
    raise AssertionError("the tiny model never ends by itself")


@pytest.mark.case("B-035")
async def test_an_answer_whose_first_token_ends_it_takes_no_decode_step_and_no_transfer(
    run, reference
):
    async with run("shm") as cluster:
        num_steps = cluster.devices["decode-0"].num_steps
        (first,) = reference(PROMPT, 1)
        stopped = await cluster.ask(PROMPT, max_tokens=20, stop_token_ids=(first,))
        ended = await cluster.ask(
            prompt_that_ends_at_once(reference.runner), max_tokens=20, ignore_eos=False
        )
        assert (stopped.token_ids, ended.token_ids) == ([first], [IM_END_ID])
        for answer in (stopped, ended):
            assert answer.is_stopped
            assert answer.completion.transfer is None
            assert answer.completion.usage.num_output_tokens == 1
            assert answer.completion.usage.num_transferred_tokens == 0
        assert cluster.devices["decode-0"].num_steps == num_steps
        await cluster.nothing_is_left()


@pytest.mark.case("B-037")
async def test_exactly_as_many_tokens_as_were_asked_for_and_one_alone_without_decode(
    run, reference
):
    async with run("shm", "router.http_port=0") as cluster:
        decode = cluster.devices["decode-0"]
        num_steps = decode.num_steps
        for max_tokens in (1, 2, 3):
            prompt = prompt_of(40, 37 + max_tokens)
            answer = await cluster.ask(prompt, max_tokens=max_tokens)
            assert answer.token_ids == reference(prompt, max_tokens)
            # the same in one message instead of a stream
            reply = await cluster.post(
                "completions", prompt=prompt, max_tokens=max_tokens, logit_bias=NO_END
            )
            assert reply.json()["usage"]["completion_tokens"] == max_tokens
            assert answer.completion.usage.num_output_tokens == max_tokens
            num_steps += 2 * (max_tokens - 1)
            assert decode.num_steps == num_steps
        await cluster.nothing_is_left()


@pytest.mark.case("B-039")
async def test_a_drawn_first_token_is_drawn_once_and_by_the_seed(run, reference):
    async with run("shm") as cluster:
        prefill, decode = cluster.devices["prefill-0"], cluster.devices["decode-0"]
        firsts = set()
        for seed in range(50):
            num_drawn = len(prefill.sampled), len(decode.sampled)
            answer = await cluster.ask(PROMPT, max_tokens=5, temperature=1.0, seed=seed)
            assert prefill.sampled[num_drawn[0] :] == answer.token_ids[:1]
            assert decode.sampled[num_drawn[1] :] == answer.token_ids[1:]
            sampling = SamplingParams(temperature=1.0, seed=seed)
            assert answer.token_ids == reference(PROMPT, 5, sampling)
            firsts.add(answer.token_ids[0])
        assert len(firsts) > 5
        await cluster.nothing_is_left()


@pytest.mark.case("B-040")
async def test_every_token_has_its_log_probability_the_first_one_too(run, reference):
    sampling = SamplingParams(num_logprobs=5)
    async with run("shm") as cluster:
        answer = await cluster.ask(PROMPT, max_tokens=4, num_logprobs=5)
        assert len(answer.logprobs) == len(answer.token_ids) == 4
        for place, logprobs in enumerate(answer.logprobs):
            context = [*PROMPT, *answer.token_ids[:place]]
            step = SequenceStep(context, 0, [0, 1, 2], sampling)
            expected = reference.runner.step([step]).logprobs[0]
            assert logprobs.chosen == pytest.approx(expected.chosen, abs=1e-4)
            assert dict(logprobs.top) == pytest.approx(dict(expected.top), abs=1e-4)
        await cluster.nothing_is_left()


@pytest.mark.case("B-042")
async def test_the_least_number_of_tokens_holds_across_the_handoff(run, reference):
    stops = tuple(dict.fromkeys(reference(PROMPT, 60)))[:8]
    async with run("shm") as cluster:
        for least in (0, 1, 20, 50):
            answer = await cluster.ask(
                PROMPT, max_tokens=50, min_tokens=least, stop_token_ids=stops
            )
            assert answer.error is None
            assert max(least, 1) <= len(answer.token_ids) <= 50
            assert not set(answer.token_ids[: least - 1 if least else 0]) & {*stops}
        too_many = await cluster.ask(PROMPT, max_tokens=50, min_tokens=51)
        assert isinstance(too_many.error, InvalidRequest)
        assert too_many.error.field == "min_tokens"
        await cluster.nothing_is_left()


@pytest.mark.case("B-044")
@pytest.mark.parametrize("name", ["best_of", "suffix", "max_new_tokens"])
def test_what_is_not_offered_cannot_be_asked_for(name):
    with pytest.raises(TypeError, match=name):
        Sampling(**{name: 1})
    for message in (inference_pb2.SamplingParams, inference_pb2.GenerateRequest):
        with pytest.raises(ValueError, match=name):
            message(**{name: 1})


@pytest.mark.case("B-043")
@pytest.mark.parametrize(("num_prompt_tokens", "num_tokens"), [(200, 256), (490, 22)])
async def test_without_a_limit_the_documented_one_holds(run, num_prompt_tokens, num_tokens):
    async with run("shm", "engine.max_context_tokens=512", "decode.kv_cache=1MiB") as cluster:
        answer = await cluster.ask(prompt_of(num_prompt_tokens, 43))
        assert len(answer.token_ids) == num_tokens
        await cluster.nothing_is_left()


@pytest.mark.case("B-044")
async def test_prefill_samples_one_token_for_each_request_under_every_name_of_the_limit(run):
    message = {"messages": [{"role": "user", "content": "x"}], "logit_bias": NO_END}
    async with run("shm", "router.http_port=0") as cluster:
        prefill = cluster.devices["prefill-0"]
        num_sampled = len(prefill.sampled)
        limits = (1, 2, 7, 30, 64)
        answers = await asyncio.gather(
            *(cluster.ask(prompt_of(20, n), max_tokens=n) for n in limits)
        )
        assert [len(answer.token_ids) for answer in answers] == [*limits]
        for name in ("max_tokens", "max_completion_tokens"):
            reply = await cluster.post("chat/completions", **message, **{name: 7})
            assert reply.json()["usage"]["completion_tokens"] == 7
        assert len(prefill.sampled) == num_sampled + len(limits) + 2
        await cluster.nothing_is_left()


@pytest.mark.case("B-046")
async def test_a_request_that_is_tried_again_finds_its_cache_wherever_it_was_read(model, reference):
    prompts = [prompt_of(40, 460 + number) for number in range(8)]
    async with one_process(model, "shm", "prefill.replicas=2", "transfer.piece=4096") as cluster:
        # Three in a row would have a worker left alone, and six both.
        cluster.faults.order(
            *(Fault(Step.SEND, FaultKind.CORRUPT, nth) for nth in (0, 9, 20, 33, 47))
        )
        num_failed = 0

        async def ask_until_it_succeeds(number):
            nonlocal num_failed
            while True:
                # the id is the same, so nothing of an earlier try may be taken for this one's
                answer = await cluster.ask(prompts[number], max_tokens=4, request_id=f"r{number}")
                if answer.error is None:
                    return answer.token_ids
                assert isinstance(answer.error, TransferFailed)
                num_failed += 1

        answers = await asyncio.gather(*map(ask_until_it_succeeds, range(8)))
        assert answers == [reference(prompt, 4) for prompt in prompts]
        assert num_failed >= 3
        await cluster.nothing_is_left()
