"""A server in a thread of a process, as a Ray actor holds it: what ended it, in its own words."""

import asyncio

import pytest

from core.errors import ConfigError, DeviceLost, TwophaseError
from deploy import server as server_module
from deploy.server import Server


def server_that_raises(monkeypatch, error, *, is_up):
    async def serve(stop, tell):
        if is_up:
            tell("here:1")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    async def fail():
        raise error

    monkeypatch.setattr(server_module, "server_of", lambda config: serve)
    return Server(config=None)


def test_a_lost_device_is_told_as_such_and_not_as_a_group_of_errors(monkeypatch):
    server = server_that_raises(monkeypatch, DeviceLost("8 steps failed"), is_up=True)
    assert server.start() == "here:1"
    with pytest.raises(DeviceLost, match="8 steps failed"):
        server.has_ended(10.0)


@pytest.mark.parametrize("error", [ConfigError("prefill", "no"), TwophaseError("no")])
def test_so_is_what_keeps_it_from_starting(monkeypatch, error):
    with pytest.raises(type(error), match="no"):
        server_that_raises(monkeypatch, error, is_up=False).start()


def test_a_bug_is_told_as_it_is(monkeypatch):
    server = server_that_raises(monkeypatch, ZeroDivisionError(), is_up=False)
    with pytest.raises(ExceptionGroup) as caught:
        server.start()
    assert caught.group_contains(ZeroDivisionError)
