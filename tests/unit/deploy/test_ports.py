"""Ports that somebody has are refused by their key, before anything is started."""

import socket

import pytest

from core.config import load_config
from core.errors import ConfigError
from deploy.ports import require_free


@pytest.mark.case("B-152")
@pytest.mark.parametrize("key", ["port", "http_port"])
def test_a_port_that_another_deployment_has_is_refused_by_its_key(key):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ports = {"port": 0, "http_port": 0} | {key: port}
        config = load_config(None, [f"router.{name}={each}" for name, each in ports.items()])
        with pytest.raises(ConfigError) as refused:
            require_free(config.router)
    assert refused.value.path == f"router.{key}"
    assert f"127.0.0.1:{port} cannot be listened at (Address already in use" in str(refused.value)
    assert "0 takes a free port" in str(refused.value)
    require_free(config.router)  # it is free again


def test_ports_that_the_system_chooses_are_never_taken():
    require_free(load_config(None, ["router.port=0", "router.http_port=null"]).router)
