"""Log-probabilities of the prompt: right across chunks, caches and the handoff; and echo."""

import asyncio
import json

import openai
import pytest

from core.request import SamplingParams
from engine.batch import MAX_TARGETS, SequenceStep
from tests.cases.one_process import prompt_of
from tests.contract.faulty import Fault, FaultKind, Step
from twophase.client import Sampling

PROMPT = prompt_of(75, 98)
SETUP = ("router.http_port=0", "prefill.max_batch_tokens=32", "decode.max_batch_tokens=48")


def expected_of(reference, prompt, num_top):
    """All at once, in one plain step."""
    step = SequenceStep(prompt, 0, range(64), SamplingParams(), targets=prompt[1:], num_top=num_top)
    return reference.runner.step([step]).prompt_logprobs[0]


def close(logprobs, expected):
    assert [each.chosen for each in logprobs] == pytest.approx(
        [each.chosen for each in expected], abs=1e-4
    )
    for each, other in zip(logprobs, expected, strict=True):
        assert dict(each.top) == pytest.approx(dict(other.top), abs=1e-4)
    return True


async def scored(cluster, prompt, num_top, **sampling):
    sampling = {"max_tokens": 4, "ignore_eos": True, **sampling}
    return await cluster.client.generate_once(
        prompt, Sampling(num_prompt_logprobs=num_top, **sampling)
    )


@pytest.mark.case("B-040")
async def test_they_are_those_of_one_plain_step_also_where_the_prompt_is_cached(run, reference):
    async with run("shm", *SETUP, "router.on_failure=resume") as cluster:
        prefill = cluster.devices["prefill-0"]
        expected = expected_of(reference, PROMPT, 3)
        # 1 new, then cached at both workers: prefill computes all of it each time
        for _ in range(2):
            num_read = prefill.num_tokens
            answer = await scored(cluster, PROMPT, 3)
            assert close(answer.prompt_logprobs, expected)
            assert [*answer.token_ids] == reference(PROMPT, 4)
            assert prefill.num_tokens - num_read == len(PROMPT)
            assert answer.completion.usage.num_prefill_cached_tokens == 0
        assert answer.completion.usage.num_decode_cached_tokens == 64
        # 2 without them, the cache serves as ever
        usage = (await cluster.ask(PROMPT, max_tokens=2)).completion.usage
        assert usage.num_prefill_cached_tokens == 64
        # 3 a long one takes bounded steps, and others are read beside it
        prompt = prompt_of(MAX_TARGETS + 200, 99)
        answer, other = await asyncio.gather(
            scored(cluster, prompt, 0), cluster.ask(PROMPT, max_tokens=3)
        )
        assert close(answer.prompt_logprobs, expected_of(reference, prompt, 0))
        assert other.token_ids == reference(PROMPT, 3)
        # 4 a handoff that fails before the first token, or after it: told once
        for step in (Step.BEGIN, Step.SEAL):
            await cluster.nothing_is_left()  # a probe of readiness would meet the fault
            cluster.faults.order(Fault(step, FaultKind.RAISE))
            prompt = prompt_of(75, 100 + len(step))
            answer = await scored(cluster, prompt, 1)
            assert answer.completion.failures
            assert close(answer.prompt_logprobs, expected_of(reference, prompt, 1))
            assert [*answer.token_ids] == reference(prompt, 4)
        # 5 of several answers the first tells them
        first, second = await cluster.client.generate_all(
            PROMPT, Sampling(max_tokens=2, num_prompt_logprobs=3, n=2, ignore_eos=True)
        )
        assert close(first.prompt_logprobs, expected)
        assert second.prompt_logprobs == ()
        # 6 without prefill the decode worker reads the prompt, in chunks, and tells the same
        await cluster.client.admin.drain("prefill-0")
        num_read = cluster.devices["decode-0"].num_tokens
        answer = await scored(cluster, PROMPT, 3)
        assert close(answer.prompt_logprobs, expected)
        assert answer.completion.usage.num_local_prefill_tokens == len(PROMPT)
        assert cluster.devices["decode-0"].num_tokens - num_read == len(PROMPT) + 3
        await cluster.nothing_is_left()


@pytest.mark.case("B-098")
async def test_echo_tells_the_prompt_and_its_log_probabilities_whole_and_streamed(run, reference):
    async with run("shm", *SETUP) as cluster:
        text = "Grüße, 你好! \U0001f600 "
        prompt = list(await cluster.client.tokenize(text))
        expected = expected_of(reference, prompt, 2)
        base_url = f"http://{(await cluster.client.status()).http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as http:
            [model] = [each.id async for each in http.models.list()]
            asked = {"model": model, "prompt": text, "max_tokens": 5, "temperature": 0}
            asked |= {"echo": True, "extra_body": {"ignore_eos": True}}
            plain = await http.completions.create(**asked | {"echo": False, "logprobs": 2})
            echoed = await http.completions.create(**asked)
            whole = await http.completions.create(**asked, logprobs=2, n=2)
            stream = [
                event
                async for event in await http.completions.create(
                    **asked, logprobs=2, n=2, stream=True
                )
            ]
            with pytest.raises(openai.BadRequestError) as none:
                await http.completions.create(**asked | {"max_tokens": 0}, logprobs=2)
        assert none.value.param == "max_tokens"
        assert echoed.choices[0].text == text + plain.choices[0].text
        assert echoed.choices[0].logprobs is None
        for choice in whole.choices:
            logprobs = choice.logprobs
            assert choice.text == text + plain.choices[0].text
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            told = logprobs.token_logprobs[1 : len(prompt)]
            assert told == pytest.approx([each.chosen for each in expected], abs=1e-4)
            assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
            assert logprobs.token_logprobs[len(prompt) :] == pytest.approx(
                plain.choices[0].logprobs.token_logprobs, abs=1e-4
            )
            assert logprobs.text_offset[len(prompt)] == len(text)
            assert logprobs.text_offset == sorted(logprobs.text_offset)
            mine = [e.choices[0] for e in stream if e.choices[0].index == choice.index]
            assert "".join(piece.text for piece in mine) == choice.text
            for name in ("tokens", "token_logprobs", "text_offset"):
                parts = [getattr(piece.logprobs, name) for piece in mine if piece.logprobs]
                assert sum(parts, []) == pytest.approx(getattr(logprobs, name), abs=1e-4)
        assert whole.usage.prompt_tokens == len(prompt)
        assert whole.usage.completion_tokens == 10
        reply = await cluster.post("completions", prompt=[7], echo=True, logprobs=0, max_tokens=1)
        logprobs = reply.json()["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == 2 and logprobs["token_logprobs"][0] is None
        json.dumps(reply.json(), allow_nan=False)
        await cluster.nothing_is_left()
