"""An answer outlives the router that it came from: any other goes on, exactly where it stopped."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from core.completion import Chunk, Completion
from core.errors import InvalidRequest
from core.sampling import Constraint, ConstraintKind
from deploy.cli import app
from deploy.local_cluster import Child, LocalCluster
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from tests.e2e.test_survival import LATE_S, NUM_STREAMS, Stream, has_begun
from twophase.client import AsyncClient, Client, Sampling
from twophase.client.messages import generate_request
from twophase.errors import from_rpc_error
from twophase.v1 import inference_pb2 as pb
from twophase.v1 import inference_pb2_grpc as pb_grpc
from twophase.wire import chunk_from_wire

PROMPT = [5, 17, 300, 41, 17, 5, 260, 9, 77, 300, 12, 33]
PLAIN = Sampling(max_tokens=12, ignore_eos=True)
WAYS = {
    "greedy": PLAIN,
    "a seed that the router drew": replace(PLAIN, temperature=0.9),
    "penalised": replace(PLAIN, temperature=0.7, seed=3, repetition_penalty=1.3),
    "with log-probabilities": replace(PLAIN, num_logprobs=2),
    "constrained": Sampling(
        max_tokens=12, constraint=Constraint(ConstraintKind.REGEX, "(red|green|blue) [0-9]{5}")
    ),
}


@pytest.fixture(scope="module")
def cluster(tiny_model_directory: Path, start_cluster: StartCluster) -> LocalCluster:
    return start_cluster(
        tiny_model_directory,
        *("prefill.max_batch_tokens=64", "prefill.kv_cache=4MiB", "decode.kv_cache=16MiB"),
        "engine.max_context_tokens=1024",
    )


@contextmanager
def another_router(cluster: LocalCluster) -> Iterator[Child]:
    """A router of the workers of `cluster`; the disk that its log goes to is full."""
    named = [cluster.children[worker].address for worker in ("decode-0", "prefill-0")]
    config = cluster.log_directory / "cluster.yaml"
    words = [f"--config={config}", "router.port=0", f"router.workers=[{','.join(named)}]"]
    router = Child("another", "router", words, Path("/dev/full"))
    try:
        router.wait_until_up()
        yield router
    finally:
        router.stop(10.0)
        router.kill()


def ask(stub: pb_grpc.InferenceStub, message: pb.GenerateRequest) -> list[Chunk]:
    """The whole stream."""
    try:
        return [chunk_from_wire(part) for part in stub.Generate(message, timeout=LATE_S)]
    except grpc.RpcError as error:
        raise from_rpc_error(error, "router") from error


def resumed(sampling: Sampling, seed: int | None, token_ids: list[int]) -> pb.GenerateRequest:
    """The rest of an answer of which a client has `token_ids`."""
    message = generate_request(PROMPT, replace(sampling, seed=seed), "", "")
    message.resumption.SetInParent()
    message.resumption.token_ids[:] = token_ids
    return message


def told(chunks: list[Chunk]) -> tuple[str, list[int], list[object]]:
    """Text, tokens and log-probabilities, as far as float32 tells them in any batch."""
    return (
        "".join(chunk.text for chunk in chunks),
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        [[(i, round(p, 3)) for i, p in one.top] for chunk in chunks for one in chunk.logprobs],
    )


def completed(chunks: list[Chunk]) -> Completion:
    assert chunks[-1].completion is not None
    return chunks[-1].completion


def with_stop_string(text: str, sampling: Sampling) -> Sampling:
    """A string of several tokens from the middle of an answer ends it."""
    return replace(sampling, stop=(text[len(text) // 2 : len(text) // 2 + 4],))


@pytest.mark.parametrize("way", [*WAYS, "stop string"])
def test_an_answer_goes_on_behind_any_of_its_tokens(cluster: LocalCluster, way: str) -> None:
    # The router remembers nothing of the first stream: it might as well be another one.
    stub = pb_grpc.InferenceStub(grpc.insecure_channel(cluster.address))
    sampling = WAYS.get(way, PLAIN)
    if way == "stop string":
        text, *_ = told(ask(stub, generate_request(PROMPT, PLAIN, "", "")))
        sampling = with_stop_string(text, PLAIN)
    whole = ask(stub, generate_request(PROMPT, sampling, "", ""))
    seed, end = whole[0].seed, completed(whole)

    assert [chunk.seed for chunk in whole[1:]] == [None] * (len(whole) - 1)
    if way == "stop string":
        assert end.usage.num_output_tokens < 12
    for num_parts in range(len(whole)):
        had = whole[:num_parts]
        rest = ask(stub, resumed(sampling, seed, told(had)[1]))
        assert told([*had, *rest]) == told(whole), num_parts
        assert completed(rest).finish_reason == end.finish_reason
        usage = completed(rest).usage
        assert usage.num_prompt_tokens == len(PROMPT)
        assert usage.num_output_tokens == end.usage.num_output_tokens
        assert completed(rest).seed == seed
    asyncio.run(assert_nothing_left(cluster.address))


def test_what_cannot_be_the_beginning_of_the_answer_is_refused(cluster: LocalCluster) -> None:
    stub = pb_grpc.InferenceStub(grpc.insecure_channel(cluster.address))
    text, token_ids, _ = told(ask(stub, generate_request(PROMPT, PLAIN, "", "")))
    ended = replace(PLAIN, stop_token_ids=(token_ids[3],))
    for sampling, said, field in (
        (PLAIN, [*token_ids, 5], "resumption.token_ids"),
        (PLAIN, [5, 512], r"resumption.token_ids\[1\]"),
        (ended, token_ids[:5], r"resumption.token_ids\[3\]"),
        (with_stop_string(text, PLAIN), token_ids, r"resumption.token_ids\["),
        (WAYS["constrained"], [7, 8, 9], "constraint"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            ask(stub, resumed(sampling, 0, said))


@pytest.mark.timeout(120)
def test_streams_go_on_at_the_other_router_when_theirs_is_killed(cluster: LocalCluster) -> None:
    async def run(addresses: list[str], victim: Child | None = None) -> list[Stream]:
        streams = [Stream(number) for number in range(NUM_STREAMS)]
        async with (
            AsyncClient(addresses) as client,
            asyncio.timeout(LATE_S),
            asyncio.TaskGroup() as tasks,
        ):
            for stream in streams:
                tasks.create_task(stream.run(client))
            while victim is not None and not has_begun(streams):
                await asyncio.sleep(0.005)
            if victim is not None:
                victim.kill()
        return streams

    expected = asyncio.run(run([cluster.address]))
    with another_router(cluster) as victim:
        addresses = [victim.address, cluster.address]
        streams = asyncio.run(run(addresses, victim))
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in expected]
    for stream in streams:
        assert stream.completion is not None
        assert stream.completion.usage.num_output_tokens == len(stream.token_ids)
    asyncio.run(assert_nothing_left(cluster.address))
    # Every call finds the router that is left, and so does the command line.
    words = ["ask", "--raw", "Hello", "--max-tokens", "3", "--address", ",".join(addresses)]
    asked = CliRunner().invoke(app, words)
    assert "+ 3 tokens" in " ".join(asked.output.split()), asked.output
    with Client(addresses) as client:
        assert client.model().vocab_size == 512
        assert not client.cancel("nobody")
    with Client(addresses) as client:
        assert len(client.generate_once(PROMPT, PLAIN).token_ids) == 12
