"""Keys at rest and at the door: who may call what, and what an error tells."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError, PermissionDenied, Unauthenticated
from core.settings.security import SecurityConfig
from router.http.keys import KeyCheck
from router.keys import ADMIN, OPEN_SERVICES, KeyRing, Keys, caller, front_door_access, new_key
from twophase.client import AsyncClient
from twophase.server import running_server
from twophase.v1 import inference_pb2, inference_pb2_grpc

GENERATE = "/twophase.v1.Inference/Generate"
STATUS = f"/{ADMIN}/GetStatus"
USER, ADMINISTRATOR = new_key("alice"), new_key()
STRANGER, CLUSTER_SECRET = new_key()[0], new_key()[0]


@pytest.fixture
def security(tmp_path):
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text(f"# who may ask\n\n{new_key()[1]}\n  {USER[1]}  \n")
    admins.write_text(f"{ADMINISTRATOR[1]}\n")
    secret = tmp_path / "secret"
    secret.write_text(CLUSTER_SECRET)
    return SecurityConfig(api_keys=str(users), admin_keys=str(admins), cluster_secret=str(secret))


def outcome(keys, method, key):
    try:
        keys.require_for_method(method, key)
    except (Unauthenticated, PermissionDenied) as error:
        assert key is None or len(key) < len(STRANGER) - 1 or key not in str(error)
        return type(error)
    return None


def test_a_new_key_is_long_and_its_line_holds_a_hash_alone():
    key, line = new_key("alice, until May")
    assert len(key) > 40 and key.startswith("tp-")
    assert key not in line and line.endswith(" alice, until May")
    assert new_key()[0] != key


@pytest.mark.parametrize(
    ("key", "generate", "status"),
    [
        (USER[0], None, PermissionDenied),
        (ADMINISTRATOR[0], None, None),
        (CLUSTER_SECRET, None, None),
        (STRANGER, Unauthenticated, Unauthenticated),
        ("", Unauthenticated, Unauthenticated),
        (None, Unauthenticated, Unauthenticated),
        ("\u00e9\U0001f600", Unauthenticated, Unauthenticated),
        (USER[1].split()[0], Unauthenticated, Unauthenticated),
        (USER[0] + "x", Unauthenticated, Unauthenticated),
        (USER[0][:-1], Unauthenticated, Unauthenticated),
    ],
    # Keys differ with each import: names that two processes agree on.
    ids=range(10),
)
def test_who_may_ask_and_who_may_administer(security, key, generate, status):
    keys = Keys.read(security)
    assert outcome(keys, GENERATE, key) is generate
    assert outcome(keys, STATUS, key) is status


@given(st.text())
def test_no_other_text_is_a_key(text):
    keys = Keys(KeyRing((bytes(32),)), KeyRing((bytes(31) + b"1",)))
    assert outcome(keys, GENERATE, text) is Unauthenticated
    assert outcome(keys, STATUS, text) is Unauthenticated


@pytest.mark.parametrize("method", ["/", "", "/x", "//", "/twophase.v1.Adm/x", "/grpc.health.v1/x"])
def test_what_is_not_known_is_not_open(security, method):
    assert outcome(Keys.read(security), method, None) is Unauthenticated


@pytest.mark.parametrize("service", sorted(OPEN_SERVICES))
def test_health_and_reflection_are_open(security, service):
    assert outcome(Keys.read(security), f"/{service}/Check", None) is None


def test_admin_keys_alone_leave_the_model_open(security):
    keys = Keys.read(security.model_copy(update={"api_keys": None}))
    assert outcome(keys, GENERATE, None) is None
    assert outcome(keys, STATUS, None) is Unauthenticated
    assert outcome(keys, STATUS, ADMINISTRATOR[0]) is None


@pytest.mark.parametrize(
    "line",
    [
        STRANGER,
        f"sha256:{STRANGER}",
        f"sha256:{63 * '0'}",
        f"sha256:{65 * '0'}",
        f"sha256:{64 * 'A'}",
        f"md5:{32 * '0'}",
        f"{64 * '0'}",
    ],
    ids=range(7),
)
def test_a_line_that_is_no_hash_is_refused_by_number_and_not_quoted(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text(f"{USER[1]}\n{line}\n")
    with pytest.raises(ConfigError, match=r"security\.api_keys: line 2 is not") as caught:
        KeyRing.read("api_keys", str(file))
    assert line not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="names no key"):
        KeyRing.read("api_keys", str(file))


def test_a_door_for_everybody_is_not_opened_to_other_machines(security):
    with pytest.raises(ConfigError, match=r"router\.host: 0\.0\.0\.0:1 can be reached"):
        front_door_access(SecurityConfig(), "0.0.0.0:1")

    assert not front_door_access(SecurityConfig(), "127.0.0.1:1")[0].knows_callers
    assert not front_door_access(SecurityConfig(insecure=True), "0.0.0.0:1")[0].knows_callers
    assert front_door_access(security, "0.0.0.0:1")[0].knows_callers


def test_tls_without_client_certificates_or_keys_is_not_enough(tmp_path):
    files = {"certificate": tmp_path / "c", "private_key": tmp_path / "k"}
    with pytest.raises(ConfigError, match="nothing tells who calls"):
        front_door_access(SecurityConfig(**files), "10.0.0.1:1")
    mutual = SecurityConfig(**files, client_ca=tmp_path / "ca")
    assert front_door_access(mutual, "10.0.0.1:1")[0].knows_callers


class Who(inference_pb2_grpc.InferenceServicer):
    """Answers with who called."""

    async def GetModel(self, request, context):
        return inference_pb2.GetModelResponse(model=caller.get())


async def test_the_servicer_knows_which_key_a_call_came_with(security):
    access, _ = front_door_access(security, "127.0.0.1:0")
    async with running_server("127.0.0.1:0", access, stop_grace_s=0) as server:
        inference_pb2_grpc.add_InferenceServicer_to_server(Who(), server.grpc)
        address = await server.start()
        names = []
        for key in (USER[0], ADMINISTRATOR[0], USER[0]):
            async with AsyncClient(address, api_key=key) as client:
                names.append((await client.model()).model)
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="API key is missing or wrong"):
                await inference_pb2_grpc.InferenceStub(channel).GetModel(
                    inference_pb2.GetModelRequest(), timeout=5
                )

    assert names[0] == names[2] != names[1]
    assert USER[1].startswith(f"sha256:{names[0]}")


async def test_so_does_the_http_application(security):
    names = []

    async def app(scope, receive, send):
        names.append(caller.get())

    keys = Keys.read(security)
    check = KeyCheck(app, keys.require_user, keys.require_admin)
    header = (b"authorization", f"Bearer {USER[0]}".encode())
    await check({"type": "http", "path": "/v1/models", "headers": [header]}, None, None)

    assert len(names) == 1 and USER[1].startswith(f"sha256:{names[0]}") and names[0]
