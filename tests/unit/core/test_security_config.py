"""The security section: what goes together, where secrets are read, and that none is quoted."""

from dataclasses import replace

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.settings.security import SecurityConfig, Tls, is_loopback, is_token

SECRET = "s3cr3t-" + 40 * "x"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["security.certificate=a"], "certificate and private_key go together"),
        (["security.private_key=a"], "certificate and private_key go together"),
        (["security.client_ca=a"], "client_ca has no effect without certificate"),
        (["security.internal_ca=a"], "internal_ca go together"),
        (
            ["security.internal_certificate=a", "security.internal_private_key=a"],
            "internal_ca go together",
        ),
        (["security.internal_server_name=a"], "has no effect without internal_ca"),
        (["security.server_name=a"], "has no effect without certificate"),
        (["security.admin_keys=a"], "admin_keys needs cluster_secret"),
        (["security.api_keys=a"], "without admin_keys would leave the admin service open"),
    ],
)
def test_settings_that_cannot_take_effect_alone_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=f"security: .*{problem}"):
        load_config(None, overrides)


def test_a_whole_section_gives_both_ends_their_files():
    names = ("certificate", "private_key", "client_ca")
    own = [f"security.{name}=front-{name}.pem" for name in names]
    own += [f"security.internal_{name}=in-{name}.pem" for name in (*names[:2], "ca")]
    security = load_config(None, [*own, "security.internal_server_name=worker"]).security

    front, internal = security.front_door_tls, security.internal_tls
    assert str(front.ca) == "front-client_ca.pem"
    assert (front.certificate.name, front.private_key.name) == (
        "front-certificate.pem",
        "front-private_key.pem",
    )
    assert internal == Tls(
        security.internal_ca,
        security.internal_certificate,
        security.internal_private_key,
        "worker",
    )
    assert security.own_client_tls == replace(internal, ca=front.certificate, server_name=None)
    assert SecurityConfig().own_client_tls is None
    assert SecurityConfig().front_door_tls is None
    assert SecurityConfig().internal_tls is None
    assert SecurityConfig().read_cluster_secret() is None


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"security\.api_key: .* 'api_keys'"):
        load_config(None, ["security.api_key=a"])


@pytest.mark.parametrize("setting", ["cluster_secret", "admin_keys", "internal_ca", "api_key"])
@pytest.mark.parametrize("value", [SECRET, f"[{SECRET}]", f"{{a: {SECRET}}}"])
def test_a_secret_in_the_place_of_its_name_is_never_quoted(setting, value):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"security.{setting}={value}"]).security.read_cluster_secret()
        raise ConfigError("security", "a path that no secret was expected in")
    assert SECRET not in str(caught.value)


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("MY_SECRET", SECRET)
    for source in (str(file), "env:MY_SECRET"):
        assert SecurityConfig(cluster_secret=source).read_cluster_secret() == SECRET


@pytest.mark.parametrize(
    "text", ["", "too-short", 20 * "two words ", 40 * "\u00e9", f"{SECRET}\n{SECRET}"]
)
def test_what_is_no_secret_is_refused_and_not_quoted(tmp_path, text):
    file = tmp_path / "secret"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="cluster_secret: must hold at least 32") as caught:
        SecurityConfig(cluster_secret=str(file)).read_cluster_secret()
    assert text.strip() == "" or text.strip() not in str(caught.value)


def test_a_secret_that_cannot_be_read_is_an_error_with_its_key(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    monkeypatch.delenv("NOT_SET", raising=False)
    for source, problem in (
        (str(tmp_path / "missing"), "cannot be read"),
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "binary"), "no text in UTF-8"),
        ("env:NOT_SET", "not set"),
    ):
        with pytest.raises(ConfigError, match=rf"security\.cluster_secret: .*{problem}"):
            SecurityConfig(cluster_secret=source).read_cluster_secret()


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:0", True),
        ("127.9.9.9:80", True),
        ("localhost:80", True),
        ("[::1]:80", True),
        ("::1:80", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        (":80", False),
        ("10.0.0.1:80", False),
        ("localhost.example:80", False),
        ("worker-0:80", False),
    ],
)
def test_what_only_this_machine_reaches(listen, expected):
    assert is_loopback(listen) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("tp-abc_-=", True), ("", False), ("a b", False), ("a\nb", False), ("\u00e9", False)],
)
def test_what_a_header_can_carry(text, expected):
    assert is_token(text) is expected
