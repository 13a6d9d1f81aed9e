"""The `openai` package, unchanged, against a real cluster; and the same answers as over gRPC."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from core.completion import ChatMessage
from deploy.local_cluster import LocalCluster
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import Client, Sampling

SETUP = ("decode.kv_cache=8MiB", "prefill.kv_cache=8MiB", "engine.max_context_tokens=2048")
MESSAGES = [{"role": "user", "content": "Name three rivers."}]
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
NUM_CLIENTS = 20


@pytest.fixture(scope="module")
def cluster(tiny_model_directory: Path, start_cluster: StartCluster) -> LocalCluster:
    return start_cluster(tiny_model_directory, *SETUP)


@pytest.fixture(scope="module")
def base_url(cluster: LocalCluster) -> str:
    with Client(cluster.address) as client:
        return f"http://{client.status().http_address}"


@pytest.fixture
def client(cluster: LocalCluster, base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.fixture(scope="module")
def model(tiny_model_directory: Path) -> str:
    return str(tiny_model_directory)


def test_the_model_is_listed_and_found_by_name(client: openai.OpenAI, model: str) -> None:
    assert [found.id for found in client.models.list()] == [model]
    assert client.models.retrieve(model).owned_by == "twophase"


def test_a_chat_has_the_tokens_of_grpc_whole_and_streamed(
    client: openai.OpenAI, cluster: LocalCluster, model: str
) -> None:
    with Client(cluster.address) as grpc:
        prompt = [ChatMessage("user", MESSAGES[0]["content"])]
        chunks = list(grpc.generate(prompt, Sampling(max_tokens=60, ignore_eos=True)))
    expected = "".join(chunk.text for chunk in chunks)
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]

    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=60, **GREEDY
    )
    stream = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_completion_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    opening, *tokens, closing, usage = stream

    assert whole.choices[0].message.content == expected
    assert whole.choices[0].token_ids == token_ids
    assert whole.choices[0].finish_reason == closing.choices[0].finish_reason == "length"
    assert opening.choices[0].delta.role == "assistant"
    pieces = [event.choices[0].delta.content or "" for event in (*tokens, closing)]
    assert "".join(pieces) == expected
    assert [event.choices[0].token_ids for event in tokens] == [[i] for i in token_ids]
    assert usage.usage.completion_tokens == whole.usage.completion_tokens == 60
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens > 10
    assert all(event.usage is None for event in (*tokens, closing))
    for answer in (whole, closing):
        assert answer.twophase["transfer"]["num_bytes"] >= 0
        assert answer.twophase["phases"]["decode_s"] > 0
        assert (answer.twophase["prefill_worker"], answer.twophase["decode_worker"]) == (
            "prefill-0",
            "decode-0",
        )


def test_a_completion_has_the_tokens_of_grpc_for_text_and_token_ids(
    client: openai.OpenAI, cluster: LocalCluster, model: str
) -> None:
    for prompt in ("Once upon a time", [5, 6, 7]):
        with Client(cluster.address) as grpc:
            chunks = list(grpc.generate(prompt, Sampling(max_tokens=16, ignore_eos=True)))
        whole = client.completions.create(model=model, prompt=prompt, **GREEDY)
        stream = client.completions.create(model=model, prompt=prompt, stream=True, **GREEDY)

        expected = "".join(chunk.text for chunk in chunks)
        assert whole.choices[0].text == expected
        assert whole.usage.completion_tokens == 16
        assert "".join(event.choices[0].text for event in stream) == expected


def test_a_seed_draws_the_same_tokens_over_both_doors(
    client: openai.OpenAI, cluster: LocalCluster, model: str
) -> None:
    with Client(cluster.address) as grpc:
        sampling = Sampling(max_tokens=30, temperature=0.9, top_p=0.95, top_k=40, seed=5)
        chunks = list(grpc.generate([9, 8, 7], sampling))
    answer = client.completions.create(
        model=model,
        prompt=[9, 8, 7],
        max_tokens=30,
        temperature=0.9,
        top_p=0.95,
        seed=5,
        extra_body={"top_k": 40, "return_token_ids": True},
    )

    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert answer.choices[0].token_ids == token_ids


def test_several_choices_come_whole_and_streamed_with_one_prompt_in_the_usage(
    client: openai.OpenAI, model: str
) -> None:
    fields = {
        "model": model,
        "messages": MESSAGES,
        "max_completion_tokens": 12,
        "temperature": 0.9,
        "seed": 3,
        "n": 3,
        "extra_body": GREEDY["extra_body"],
    }
    whole = client.chat.completions.create(**fields)
    alone = client.chat.completions.create(**fields | {"n": 1})
    texts, reasons, usages = ["", "", ""], {}, []
    for event in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usages += [event.usage] if event.usage else []
        for choice in event.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason

    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == texts
    assert alone.choices[0].message.content == texts[0]
    assert len(set(texts)) == 3
    assert reasons == dict.fromkeys(range(3), "length")
    for usage in (whole.usage, *usages):
        assert usage.prompt_tokens == alone.usage.prompt_tokens
        assert usage.completion_tokens == 36
    assert len(usages) == 1


def test_echo_scores_the_prompt_the_same_when_it_is_cached(
    client: openai.OpenAI, cluster: LocalCluster, model: str
) -> None:
    text = "Rivers run to the sea, and the sea is never full."
    asked = {"model": model, "prompt": text, "max_tokens": 3, "echo": True, "logprobs": 2, **GREEDY}
    first = client.completions.create(**asked).choices[0]
    again = client.completions.create(**asked).choices[0]
    with Client(cluster.address) as grpc:
        sampling = Sampling(max_tokens=3, ignore_eos=True, num_prompt_logprobs=2)
        answer = grpc.generate_once(text, sampling)

    assert first.text == text + answer.text
    scores = [logprobs.chosen for logprobs in answer.prompt_logprobs]
    for choice in (first, again):
        assert choice.logprobs.token_logprobs[0] is None
        told = choice.logprobs.token_logprobs[1 : 1 + len(scores)]
        assert told == pytest.approx(scores, abs=1e-4)
        assert len(choice.logprobs.tokens) == 1 + len(scores) + 3
        assert "".join(choice.logprobs.tokens[: 1 + len(scores)]) == text


def test_unset_temperature_draws_and_tells_the_seed_that_repeats_it(
    client: openai.OpenAI, model: str
) -> None:
    def ask(**fields: int) -> openai.types.Completion:
        return client.completions.create(model=model, prompt=[4, 4], max_tokens=20, **fields)

    first, second = ask(), ask()
    again = ask(seed=first.twophase["seed"])

    assert first.choices[0].text != second.choices[0].text
    assert again.choices[0].text == first.choices[0].text


def test_server_timing_tells_the_phases_of_a_whole_answer(
    client: openai.OpenAI, model: str
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=3
    )
    timings = dict(part.split(";dur=") for part in raw.headers["server-timing"].split(", "))
    phases = raw.parse().twophase["phases"]

    assert float(timings["prefill"]) == pytest.approx(phases["prefill_s"] * 1e3, abs=1e-3)
    total = sum(float(ms) for name, ms in timings.items() if name != "total")
    assert total == pytest.approx(float(timings["total"]), abs=0.1)


def test_errors_arrive_as_the_package_knows_them(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-none", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as tools:
        function = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model=model, messages=MESSAGES, tools=[function])
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="word " * 2048, stream=True)

    assert unknown.value.code == "model_not_found"
    assert tools.value.param == "tools"
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    assert long.value.type == "invalid_request_error"


def test_streams_that_are_left_leave_nothing_behind(
    cluster: LocalCluster, base_url: str, model: str
) -> None:
    async def leave(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.completions.create(
            model=model,
            prompt=[number + 3] * 40,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()

    async def leave_unary(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(
                model=model, prompt=[3], max_tokens=2000, timeout=0.3, **GREEDY
            )

    async def leave_all() -> None:
        url = f"{base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_CLIENTS):
                    tasks.create_task(leave(client, number))
                tasks.create_task(leave_unary(client))
        await assert_nothing_left(cluster.address)

    asyncio.run(leave_all())


def test_the_example_of_the_readme_runs(
    client: openai.OpenAI, base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    [example] = [block for block in blocks if "import OpenAI" in block]

    exec(example.replace("http://127.0.0.1:8000", base_url), {})

    assert "'prefill_s': " in capsys.readouterr().out


def test_health_and_readiness_answer(base_url: str) -> None:
    assert httpx2.get(f"{base_url}/health").json() == {"status": "alive"}
    assert httpx2.get(f"{base_url}/ready").json() == {"status": "ready"}


def test_what_no_client_library_sends_is_refused(base_url: str, cluster: LocalCluster) -> None:
    url = f"{base_url}/v1/completions"
    as_json = {"content-type": "application/json"}
    with httpx2.Client() as client:
        surrogate = client.post(url, content=b'{"prompt": "\\ud800"}', headers=as_json)
        latin = client.post(url, content='{"prompt": "é"}'.encode("latin-1"), headers=as_json)
        large = client.post(url, content=b'"' + b"x" * (17 << 20), headers=as_json)
        form = client.post(url, data={"prompt": "hi"})
        chunked = client.post(
            url, content=iter([b'{"prompt": [1], ', b'"max_tokens": 2}']), headers=as_json
        )

    assert [r.status_code for r in (surrogate, latin, large, form)] == [400, 400, 413, 415]
    assert json.loads(large.content)["error"]["type"] == "invalid_request_error"
    assert chunked.json()["usage"]["completion_tokens"] <= 2
    asyncio.run(assert_nothing_left(cluster.address))
