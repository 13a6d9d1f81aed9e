"""Time only goes forward, and a refused start ends in one line and exit code 2."""

import asyncio
import os
import signal

import pytest

from core.clock import ManualClock, MonotonicClock
from core.errors import ConfigError, ModelError
from core.process import EXIT_REFUSED, exit_code_of, until_signal


class TestClocks:
    def test_the_manual_clock_stands_still_until_advanced(self):
        clock = ManualClock(5.0)
        assert (clock.now_s(), clock.now_s()) == (5.0, 5.0)
        clock.advance(1.5)
        assert clock.now_s() == 6.5

    def test_the_manual_clock_never_goes_back(self):
        with pytest.raises(ValueError, match="cannot go back"):
            ManualClock().advance(-1.0)

    def test_the_machines_clock_never_goes_back(self):
        clock = MonotonicClock()
        assert clock.now_s() <= clock.now_s()


class TestExitCodes:
    def test_zero_after_a_run_that_ends(self):
        assert exit_code_of(lambda: None) == 0

    def test_a_refusal_is_one_line_for_people(self, capsys):
        def run():
            raise ConfigError("router.port", "is odd")

        assert exit_code_of(run) == EXIT_REFUSED
        assert capsys.readouterr().err == "twophase: router.port: is odd\n"

    def test_a_refusal_out_of_a_task_group_is_the_same_line(self, capsys):
        def run():
            group = BaseExceptionGroup("inner", [ValueError("noise"), ModelError("no model")])
            raise BaseExceptionGroup("outer", [group])

        assert exit_code_of(run) == EXIT_REFUSED
        assert capsys.readouterr().err == "twophase: no model\n"

    def test_a_bug_is_not_hidden(self):
        def run():
            raise ExceptionGroup("bugs", [ValueError("a bug")])

        with pytest.raises(ExceptionGroup, match="bugs"):
            exit_code_of(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_asks_to_stop_in_order(number):
    async def serve(stop):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5.0)

    try:
        await until_signal(serve)
    finally:
        for used in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(used)
