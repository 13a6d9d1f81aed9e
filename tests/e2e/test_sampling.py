"""Every way to choose tokens is right across the handoff: the tokens of one plain process."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from core.errors import InvalidRequest
from core.layout import Dtype
from core.request import SamplingParams
from core.sampling import Constraint, ConstraintKind
from deploy.local_cluster import LocalCluster
from engine.runner import Runner
from router.constraint import grammar_of
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from tests.engine_loop import generate
from tests.tiny_model import IM_END_ID
from twophase.client import Client, Sampling

PROMPT = [5, 17, 300, 41, 17, 5, 260, 9, 77, 300, 12, 33, 5, 8, 120, 64, 11, 3, 17]
MAX_TOKENS = 40
EOS = (IM_END_ID,)
# Out of 512 tokens so many end the answer: without min_tokens it would end early.
STOPS = tuple(range(0, 512, 4))

WAYS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 11},
    "min_p": {"temperature": 1.5, "seed": 12, "min_p": 0.02},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency penalty": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "bias": {"logit_bias": ((7, 4.0), (300, -100.0))},
    "everything": {
        "temperature": 0.9,
        "seed": 13,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.1,
        "logit_bias": ((9, 1.0),),
    },
}


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
    # A model that knows nothing would fill the answer with blanks.
    "x-guidance": {"whitespace_flexible": False},
}
CONSTRAINTS = {
    "schema": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Constraint(ConstraintKind.REGEX, "(red|green|blue) [0-9]{3}"),
    "lark": Constraint(ConstraintKind.LARK, 'start: "yes" | "no"'),
}


@pytest.fixture(scope="module")
def cluster(tiny_model_directory: Path, start_cluster: StartCluster) -> LocalCluster:
    return start_cluster(
        tiny_model_directory,
        *("decode.kv_cache=8MiB", "prefill.kv_cache=8MiB", "engine.max_context_tokens=1024"),
    )


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.fixture(scope="module")
def runner(tiny_model_directory: Path) -> Runner:
    return Runner(
        tiny_model_directory,
        dtype=Dtype.FLOAT32,
        block_size=16,
        kv_cache_bytes=4 << 20,
        num_threads=1,
        max_context_tokens=1024,
    )


@pytest.mark.case("B-109")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_tokens_are_those_of_one_plain_process(
    client: Client, runner: Runner, way: dict[str, object]
) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, **way)  # type: ignore[arg-type]
    expected = generate(runner, [PROMPT], max_tokens=MAX_TOKENS, sampling=params)[0]

    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True, **way)  # type: ignore[arg-type]
    chunks = list(client.generate(PROMPT, sampling))

    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected


def test_no_stop_token_comes_before_the_least_number(client: Client) -> None:
    def tokens(min_tokens: int) -> list[int]:
        sampling = Sampling(MAX_TOKENS, stop_token_ids=STOPS[:64], min_tokens=min_tokens)
        return [i for chunk in client.generate(PROMPT, sampling) for i in chunk.token_ids]

    num_tokens = len(tokens(0))
    assert num_tokens < MAX_TOKENS
    longer = tokens(num_tokens + 2)
    assert len(longer) > num_tokens + 2
    assert not set(longer[: num_tokens + 2]) & set(STOPS[:64])


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_answer_matches_and_is_that_of_one_plain_process(
    client: Client, runner: Runner, constraint: Constraint, temperature: float
) -> None:
    asked = Sampling(max_tokens=60, temperature=temperature, seed=3, constraint=constraint)
    chunks = list(client.generate(PROMPT, asked))
    text = "".join(chunk.text for chunk in chunks)
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]

    completion = chunks[-1].completion
    assert completion is not None and completion.finish_reason == "stop"
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            answer = json.loads(text)
            assert set(answer) == {"name", "size"}
            assert isinstance(answer["size"], int)
        case ConstraintKind.REGEX:
            assert re.fullmatch(constraint.text, text)
        case ConstraintKind.LARK:
            assert text in ("yes", "no")
    params = SamplingParams(
        max_tokens=60,
        temperature=temperature,
        seed=3,
        stop_token_ids=EOS,
        grammar=grammar_of(constraint, asked, EOS),
    )
    expected = generate(runner, [PROMPT], max_tokens=len(token_ids), sampling=params)[0]
    assert token_ids == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"constraint": Constraint(ConstraintKind.REGEX, "(((")}, "constraint.regex"),
        ({"constraint": Constraint(ConstraintKind.REGEX, "a" * 65_537)}, "constraint.regex"),
        ({"constraint": CONSTRAINTS["lark"], "ignore_eos": True}, "ignore_eos"),
        ({"constraint": CONSTRAINTS["lark"], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_a_constraint_that_cannot_be_served_is_refused(
    client: Client, fields: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        list(client.generate(PROMPT, Sampling(max_tokens=8, **fields)))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_each_token_comes_with_its_log_probability(client: Client) -> None:
    sampling = Sampling(max_tokens=8, num_logprobs=3, ignore_eos=True)
    chunks = list(client.generate(PROMPT, sampling))
    pairs = [p for c in chunks for p in zip(c.token_ids, c.logprobs, strict=True)]
    assert len(pairs) == 8
    for token_id, logprobs in pairs:
        assert len(logprobs.top) == 3
        # Greedy: the chosen one is the likeliest.
        assert (token_id, logprobs.chosen) == logprobs.top[0]
        assert sum(math.exp(value) for _, value in logprobs.top) <= 1.0 + 1e-5


def test_a_stop_string_ends_the_answer_and_is_not_shown(client: Client) -> None:
    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
    whole = "".join(chunk.text for chunk in client.generate(PROMPT, sampling))
    stop = whole[10:14]
    begin = whole.index(stop)
    chunks = list(client.generate(PROMPT, Sampling(MAX_TOKENS, ignore_eos=True, stop=(stop,))))
    completion = chunks[-1].completion
    assert "".join(chunk.text for chunk in chunks) == whole[:begin]
    assert completion is not None
    assert completion.finish_reason == "stop"
    assert completion.usage.num_output_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert completion.usage.num_output_tokens < MAX_TOKENS


def test_the_openai_package_asks_for_all_of_it(client: Client, cluster: LocalCluster) -> None:
    address = client.status().http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as http:
        model = http.models.list().data[0].id
        answer = http.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            max_completion_tokens=6,
            temperature=0.0,
            logprobs=True,
            top_logprobs=2,
            presence_penalty=0.5,
            logit_bias={"7": 1},
            stop=["never seen"],
            extra_body={"ignore_eos": True},
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 6
        told = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
        assert told.decode(errors="replace") == answer.choices[0].message.content
        texts = http.completions.create(
            model=model, prompt=PROMPT, max_tokens=4, logprobs=2, extra_body={"ignore_eos": True}
        )
        parallel = texts.choices[0].logprobs
        assert parallel is not None and parallel.tokens is not None
        assert len(parallel.tokens) == len(parallel.token_logprobs or []) == 4
        structured = http.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            max_completion_tokens=60,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
            },
        )
        assert set(json.loads(structured.choices[0].message.content or "")) == {"name", "size"}
        choice = http.completions.create(
            model=model,
            prompt=PROMPT,
            extra_body={"structured_outputs": {"choice": ["a b", "c.d"]}},
        )
        assert choice.choices[0].text in ("a b", "c.d")
