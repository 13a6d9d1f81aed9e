"""The HTTP endpoint with keys and TLS: over loopback, through the server that listens."""

import asyncio
import contextlib
import ssl
from dataclasses import replace

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from core.errors import PermissionDenied, Unauthenticated
from router.http.keys import KeyCheck
from router.http.server import HttpServer
from router.page.routes import FILE_PATHS
from tests.certificates import Authority

KEY = "tp-the-right-one"
ADMIN_MARK = "-of-an-admin"
ASK = "/v1/completions"


def require(key):
    if key != KEY:
        raise Unauthenticated("the API key is missing or wrong")


def require_admin(key):
    require(None if key is None else key.removesuffix(ADMIN_MARK))
    if key == KEY:
        raise PermissionDenied("this needs an admin key")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@contextlib.asynccontextmanager
async def serving(tls=None):
    server = HttpServer(
        KeyCheck(PlainTextResponse("inside"), require, require_admin),
        host="127.0.0.1",
        port=0,
        grace_s=1,
        tls=tls,
    )
    with server.bound() as address:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            try:
                yield f"{'https' if tls else 'http'}://{address}"
            finally:
                server.stop()


async def get(url, key=None, *, verify=True, cert=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    context = ssl.create_default_context(cafile=verify) if verify is not True else verify
    if cert is not None:
        context.load_cert_chain(*cert)
    async with httpx2.AsyncClient(verify=context) as client:
        return await client.post(url, headers=headers, json={"prompt": "x"}, timeout=5)


async def test_the_right_key_comes_in_and_others_hear_401_in_openais_form():
    async with serving() as url:
        assert (await get(url + ASK, KEY)).text == "inside"
        for key in (None, "tp-the-wrong-one", KEY + "x"):
            refused = await get(url + ASK, key)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"] == {
                "message": "the API key is missing or wrong",
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_api_key",
            }


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/health", 200), ("/ready", 200)),
        *(("/", 200), ("/metrics", 401), ("/v1/models", 401), ("/no/such", 401)),
        *(("/health/", 401), ("//health", 401), ("/health/../v1/models", 401)),
    ],
)
async def test_health_and_the_way_to_the_page_are_open(path, status):
    async with serving() as url:
        assert (await get(url + path)).status_code == status


async def test_the_files_of_the_page_are_open_and_what_it_shows_wants_an_admin_key():
    async with serving() as url:
        for path in FILE_PATHS:
            assert (await get(url + path)).status_code == 200
        for path in ("/ui/state", "/ui/requests/chat-1", "/ui/", "/ui/page.js/", "/ui/no-such"):
            assert (await get(url + path)).status_code == 401
            refused = await get(url + path, KEY)
            assert refused.status_code == 403
            assert refused.json()["error"]["message"] == "this needs an admin key"
            assert (await get(url + path, KEY + ADMIN_MARK)).status_code == 200


async def test_over_tls_the_same_holds(authority):
    own = replace(authority.issue("front", "127.0.0.1"), ca=None)
    async with serving(own) as url:
        assert (await get(url + ASK, KEY, verify=authority.ca)).text == "inside"
        assert (await get(url + ASK, verify=authority.ca)).status_code == 401
        with pytest.raises(httpx2.ConnectError):
            await get(url + ASK, KEY)
        with pytest.raises(httpx2.TransportError):
            await get(url.replace("https", "http") + ASK, KEY)
        assert (await get(url + ASK, KEY, verify=authority.ca)).text == "inside"


async def test_with_mutual_tls_a_client_without_a_certificate_is_cut_off(authority):
    own = authority.issue("mutual", "127.0.0.1")
    async with serving(own) as url:
        cert = (own.certificate, own.private_key)
        assert (await get(url + ASK, KEY, verify=authority.ca, cert=cert)).text == "inside"
        with pytest.raises(httpx2.TransportError):
            await get(url + ASK, KEY, verify=authority.ca)
