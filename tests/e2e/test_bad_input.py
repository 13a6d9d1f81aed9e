"""Bad input gets one clear error that names field, value and limit; nobody else is disturbed."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from core.completion import ChatMessage
from core.errors import InvalidRequest
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from tests.tiny_model import write_tiny_model
from twophase.client import Client, Prompt, Sampling
from twophase.v1 import inference_pb2, inference_pb2_grpc

CONTEXT = 256
SETUP = ("decode.kv_cache=2MiB", f"engine.max_context_tokens={CONTEXT}")

REFUSED: list[tuple[str, Prompt, Sampling, str]] = [
    ("empty text", "", Sampling(), "prompt"),
    ("no ids", (), Sampling(), "prompt"),
    ("no messages", [ChatMessage("nobody", "x")], Sampling(), "messages[0].role"),
    ("longer than the context", [5] * CONTEXT, Sampling(), "prompt"),
    ("long text", "word " * 400, Sampling(), "prompt"),
    ("id outside the vocabulary", [5, 512], Sampling(), "prompt_token_ids[1]"),
    ("no room for the answer", [5] * 200, Sampling(max_tokens=57), "max_tokens"),
    ("no tokens asked", "x", Sampling(max_tokens=0), "max_tokens"),
    ("hot", "x", Sampling(temperature=2.5), "temperature"),
    ("not a number", "x", Sampling(temperature=float("nan")), "temperature"),
    ("infinite", "x", Sampling(temperature=float("inf")), "temperature"),
    ("negative", "x", Sampling(temperature=-1.0), "temperature"),
    ("top_p of nothing", "x", Sampling(top_p=0.0), "top_p"),
    ("top_p of too much", "x", Sampling(top_p=1.5), "top_p"),
    ("seed beyond 63 bits", "x", Sampling(seed=2**63), "seed"),
    ("stop id outside", "x", Sampling(stop_token_ids=(9999,)), "stop_token_ids[0]"),
    ("too many stop ids", "x", Sampling(stop_token_ids=tuple(range(65))), "stop_token_ids"),
]


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_a_bad_request_is_refused_by_field_while_a_stream_runs_on(
    tiny_model_directory: Path,
    start_cluster: StartCluster,
    prompt: Prompt,
    sampling: Sampling,
    field: str,
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        undisturbed = _tokens(client)

        neighbour = client.generate([1, 2, 3], Sampling(max_tokens=40, ignore_eos=True))
        first = next(neighbour)
        with pytest.raises(InvalidRequest) as refusal:
            list(client.generate(prompt, sampling))
        rest = [token for chunk in neighbour for token in chunk.token_ids]

    assert refusal.value.field == field
    assert refusal.value.value and refusal.value.limit
    assert (*first.token_ids, *rest) == undisturbed
    asyncio.run(assert_nothing_left(cluster.address))


def test_an_unknown_model_and_a_request_without_input_are_invalid_arguments(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with grpc.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for request, field in (
            (inference_pb2.GenerateRequest(model="gpt-5", prompt="x"), "model is gpt-5"),
            (inference_pb2.GenerateRequest(), "input is unset"),
            (inference_pb2.GenerateRequest(prompt="x", request_id="y" * 129), "request_id is 129"),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                list(stub.Generate(request, timeout=10))
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.value.details().startswith(field)


def test_a_request_id_in_use_is_refused_and_the_first_stream_goes_on(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    with Client(cluster.address) as client:
        first = client.generate([1, 2], sampling, request_id="twin")
        num_tokens = len(next(first).token_ids)
        with pytest.raises(InvalidRequest, match="twin"):
            list(client.generate([1, 2], sampling, request_id="twin"))
        num_tokens += sum(len(chunk.token_ids) for chunk in first)
    assert num_tokens == 60
    asyncio.run(assert_nothing_left(cluster.address))


def _run(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_wrong_key_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("decode:\n  replica: 2\n", encoding="utf-8")

    result = _run("-m", "deploy.cli", "serve", str(path))

    assert result.returncode == 2
    assert result.stderr == (
        "twophase: decode.replica: is not a known key; did you mean 'replicas'?\n"
    )


def test_an_unknown_model_ends_with_one_line_and_code_2() -> None:
    result = _run("-m", "deploy.cli", "serve", "model=smollm2-135m-instrukt")

    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "smollm2-135m-instruct" in result.stderr


def test_half_downloaded_weights_end_with_one_line_and_code_2(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "broken")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    result = _run("-m", "decode_worker", f"model={directory}")

    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("twophase: ")
    assert "model.safetensors" in last


def test_no_memory_for_one_block_ends_with_one_line_and_code_2(
    tiny_model_directory: Path,
) -> None:
    result = _run("-m", "decode_worker", f"model={tiny_model_directory}", "decode.kv_cache=100")

    assert result.returncode == 2
    assert "100" in result.stderr.splitlines()[-1]


@pytest.mark.case("B-083")
def test_a_port_in_use_ends_with_one_line_and_code_2(tiny_model_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        ports = (f"router.port={port}", "router.http_port=0")
        result = _run("-m", "router", f"model={tiny_model_directory}", *ports)

    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"twophase: listen: 127.0.0.1:{port} cannot")


def test_asking_where_nobody_listens_ends_with_one_line_and_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]

    result = _run("-m", "deploy.cli", "ask", "hello", "--address", f"127.0.0.1:{port}")

    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


def _tokens(client: Client) -> tuple[int, ...]:
    chunks = client.generate([1, 2, 3], Sampling(max_tokens=40, ignore_eos=True))
    return tuple(token for chunk in chunks for token in chunk.token_ids)
