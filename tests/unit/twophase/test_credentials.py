"""Calls between servers with secrets and certificates: who gets in, and what the others hear."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from core.clock import ManualClock
from core.errors import ConfigError, PeerLost, TwophaseError, Unauthenticated
from core.settings.security import SecurityConfig, Tls
from core.worker import CancelRequest
from tests.certificates import Authority
from twophase.client import AsyncClient, Client
from twophase.credentials import (
    Access,
    Credentials,
    bearer_token,
    internal_access,
    internal_credentials,
    server_context,
)
from twophase.peer import Peer
from twophase.server import running_server
from twophase.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

SECRET, OTHER = 40 * "s", 40 * "o"


class Worker(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.DecodeWorkerServicer):
    """Holds nothing; counts the calls that reach it."""

    num_calls = 0

    async def ListBlocks(self, request, context):
        self.num_calls += 1
        return worker_pb2.ListBlocksResponse()

    async def Session(self, requests, context):
        self.num_calls += 1
        async for _ in requests:
            return


class Model(inference_pb2_grpc.InferenceServicer):
    async def GetModel(self, request, context):
        return inference_pb2.GetModelResponse(model="tiny")


@asynccontextmanager
async def serving(access):
    worker = Worker()
    async with running_server("127.0.0.1:0", access, stop_grace_s=0) as server:
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(worker, server.grpc)
        inference_pb2_grpc.add_InferenceServicer_to_server(Model(), server.grpc)
        yield await server.start(), worker


@asynccontextmanager
async def calling(address, credentials):
    peer = Peer(address, ManualClock(), credentials)
    try:
        yield peer
    finally:
        await peer.close()


async def blocks(address, credentials):
    async with calling(address, credentials) as peer:
        return await peer.blocks(timeout_s=5)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def secured(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return SecurityConfig(cluster_secret=str(file))


async def test_who_shows_the_cluster_secret_gets_in_and_nobody_else(secured):
    async with serving(internal_access(secured)) as (address, worker):
        assert await blocks(address, internal_credentials(secured)) == []
        for stranger in (Credentials(), Credentials(OTHER), Credentials(SECRET[:-1])):
            with pytest.raises(PeerLost, match="the cluster secret is missing or wrong") as caught:
                await blocks(address, stranger)
            assert SECRET not in str(caught.value)
    assert worker.num_calls == 1


async def test_a_stream_of_a_stranger_ends_although_it_says_nothing(secured):
    async with serving(internal_access(secured)) as (address, worker):
        async with calling(address, Credentials(OTHER)) as peer, asyncio.timeout(5):
            with pytest.raises(PeerLost, match="cluster secret"):
                await anext(aiter(peer.session()))
        async with calling(address, internal_credentials(secured)) as peer, asyncio.timeout(5):
            session = peer.session()
            session.send(CancelRequest("x"))
            assert await anext(aiter(session), None) is None
    assert worker.num_calls == 1


async def test_a_method_that_does_not_exist_is_refused_like_any_other(secured):
    async with serving(internal_access(secured)) as (address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/no.such.Service/Method")(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_both_ends_of_an_internal_call_are_checked(authority, tmp_path):
    mine = authority.issue("worker", "127.0.0.1")
    strange = Authority(tmp_path / "other").issue("worker", "127.0.0.1")
    security = SecurityConfig(
        internal_certificate=mine.certificate,
        internal_private_key=mine.private_key,
        internal_ca=mine.ca,
    )
    async with serving(internal_access(security)) as (address, worker):
        assert await blocks(address, internal_credentials(security)) == []
        for stranger in (
            Credentials(),
            Credentials(tls=Tls(mine.ca)),
            Credentials(tls=replace(strange, ca=mine.ca)),
            Credentials(tls=replace(mine, ca=strange.ca)),
        ):
            with pytest.raises(TwophaseError):
                await blocks(address, stranger)
    assert worker.num_calls == 1


async def test_a_certificate_may_carry_one_name_for_all_workers(authority):
    named = authority.issue("named", "worker.twophase")
    async with serving(Access(named)) as (address, _):
        for server_name, is_let_in in (("worker.twophase", True), (None, False)):
            tls = replace(named, server_name=server_name)
            ends = await asyncio.gather(
                blocks(address, Credentials(tls=tls)), return_exceptions=True
            )
            assert (ends == [[]]) is is_let_in


async def test_the_public_clients_show_their_key_over_tls_and_without(authority):
    def require(method, token):
        if token != SECRET:
            raise Unauthenticated("the API key is missing or wrong")

    own = authority.issue("front", "127.0.0.1")
    for server_tls, client_tls in ((replace(own, ca=None), Tls(own.ca)), (None, None)):
        async with serving(Access(server_tls, require)) as (address, _):
            async with AsyncClient(address, api_key=SECRET, tls=client_tls) as client:
                assert (await client.model()).model == "tiny"
            async with AsyncClient(address, api_key=OTHER, tls=client_tls) as client:
                with pytest.raises(Unauthenticated, match="missing or wrong"):
                    await client.model()

            def ask(api_key, tls, address=address):
                with Client(address, api_key=api_key, tls=tls) as client:
                    return client.model().model

            assert await asyncio.to_thread(ask, SECRET, client_tls) == "tiny"
            with pytest.raises(Unauthenticated):
                await asyncio.to_thread(ask, None, client_tls)


def test_a_key_that_no_header_can_carry_is_refused_and_not_quoted():
    for key in ("", "two words", "line\n", "\u00e9"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            Client(api_key=key)
    assert SECRET not in repr(Credentials(SECRET))


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer ", None),
        ("Bearer", None),
        ("abc", None),
        ("", None),
        (None, None),
    ],
)
def test_the_token_of_a_header(header, token):
    assert bearer_token(header) == token


async def test_certificates_that_cannot_be_used_are_named(authority, tmp_path):
    mine, other = authority.issue("mine", "a"), authority.issue("other", "b")
    missing, junk = tmp_path / "missing.pem", tmp_path / "junk.pem"
    junk.write_text("junk")
    for tls in (
        replace(mine, certificate=missing),
        replace(mine, certificate=junk),
        replace(mine, private_key=other.private_key),
        replace(mine, ca=junk),
    ):
        for use in (
            lambda tls=tls: server_context(tls),
            lambda tls=tls: Credentials(tls=tls).open_channel(grpc, "127.0.0.1:1", ()),
        ):
            with pytest.raises(ConfigError, match=r"security: .*\.pem.* cannot be used"):
                use()
    with pytest.raises(ConfigError, match="missing.pem cannot be read"):
        Client(tls=Tls(missing))
    with pytest.raises(ConfigError, match="cannot be used for TLS"):
        async with running_server("127.0.0.1:0", Access(mine), stop_grace_s=0) as server:
            mine.certificate.unlink()
            await server.start()
