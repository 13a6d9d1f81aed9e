"""How the command line says that it reached nobody, and what it calls itself."""

import socket
import sys

import pytest
from typer.testing import CliRunner

from core.errors import InvalidRequest, PeerLost, TwophaseError
from deploy.cli import app, own_name
from deploy.commands.connection import connect
from deploy.commands.request_id import found


@pytest.fixture
def unused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    return address


def lost(address):
    with connect(address):
        raise PeerLost(address, "UNAVAILABLE")


@pytest.mark.parametrize("others", ["", ",nowhere"])
def test_where_nobody_listens_a_person_is_told_what_to_do(unused, others):
    with pytest.raises(TwophaseError, match=r"no router answers at .*refused.*twophase serve"):
        lost(unused + others)


def test_a_name_without_a_port_is_called_that():
    with pytest.raises(TwophaseError, match=r"nonsense \(is not host:port\)"):
        lost("nonsense")


def test_a_router_that_was_lost_and_listens_again_is_told_as_it_was(unused):
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        with pytest.raises(PeerLost):
            lost(f"{unused},{address}")


def test_hints_name_the_program_as_it_was_called_unless_path_has_it(monkeypatch, tmp_path):
    program = tmp_path / "twophase"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "")
    assert own_name() == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_name() == "twophase"


def test_help_begins_with_what_a_newcomer_needs_and_the_version_is_told():
    told = CliRunner().invoke(app, ["--help"]).output
    order = [
        told.index(f"\u2502 {name} ") for name in ("serve", "ask", "explain", "compare", "config")
    ]
    assert order == sorted(order)
    assert "TWOPHASE_API_KEY" in told
    assert CliRunner().invoke(app, ["--version"]).output.startswith("twophase 0.")


@pytest.mark.parametrize("asked", ["7f0c", "cmpl-7f0c", "chatcmpl-7f0c"])
def test_a_request_is_found_by_the_id_of_its_http_answer_too(asked):
    def known(request_id):
        if request_id != "7f0c":
            raise InvalidRequest("request_id", request_id, "is not known")
        return "it"

    assert found(known, asked) == "it"
    with pytest.raises(InvalidRequest, match="other"):
        found(known, f"{asked}-other")
