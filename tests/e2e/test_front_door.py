"""What a client finds at the endpoint beside Generate: health, reflection, model, messages."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.completion import ChatMessage
from core.errors import DeadlineExceeded
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Client, Sampling

SETUP = ("decode.kv_cache=2MiB", "prefill.kv_cache=2MiB", "engine.max_context_tokens=512")


def test_health_says_serving_once_a_token_went_through_both_pools(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with grpc.insecure_channel(cluster.address) as channel:
        request = health_pb2.HealthCheckRequest(service="twophase.v1.Inference")
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    with Client(cluster.address) as client:
        workers = {worker.role: worker for worker in client.status().workers}

    assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert workers["prefill"].num_steps > 0
    assert workers["decode"].num_steps > 0
    assert workers["decode"].num_transfer_bytes > 0


def test_reflection_lists_the_services(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with grpc.insecure_channel(cluster.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(stub.ServerReflectionInfo(asked, timeout=5))
    names = {service.name for service in answer.list_services_response.service}

    assert {"twophase.v1.Inference", "twophase.v1.Admin", "grpc.health.v1.Health"} <= names


def test_the_model_is_told_with_its_limits(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        info = client.model()

    assert info.model == str(tiny_model_directory)
    assert (info.vocab_size, info.max_context_tokens) == (512, 512)
    assert info.mode == "disaggregated"


def test_both_clients_give_the_same_answer_in_text_chat_and_token_ids(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    prompts = ("Hello there", [ChatMessage("user", "Hello there")], [5, 6, 7])
    sampling = Sampling(max_tokens=8, ignore_eos=True)

    async def ask_async() -> list[str]:
        async with AsyncClient(cluster.address) as client:
            return [
                "".join([chunk.text async for chunk in client.generate(prompt, sampling)])
                for prompt in prompts
            ]

    with Client(cluster.address) as client:
        answers = [
            "".join(chunk.text for chunk in client.generate(prompt, sampling)) for prompt in prompts
        ]

    assert answers == asyncio.run(ask_async())
    assert len(set(answers)) == 3
    asyncio.run(assert_nothing_left(cluster.address))


def test_a_deadline_ends_the_request_with_deadline_exceeded_and_frees_everything(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        chunks = client.generate([1], Sampling(max_tokens=500, ignore_eos=True), timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            list(chunks)

    asyncio.run(assert_nothing_left(cluster.address))
