"""Time only goes forward, and a refused start ends in one line and exit code 2."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from core.clock import ManualClock, MonotonicClock
from core.errors import ConfigError, ModelError
from core.process import EXIT_REFUSED, STOP_SIGNALS, exit_code_of, until_signal


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

    before = {used: signal.getsignal(used) for used in STOP_SIGNALS}
    try:
        await until_signal(serve)
    finally:
        for used, handler in before.items():
            asyncio.get_running_loop().remove_signal_handler(used)
            signal.signal(used, handler)


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_the_second_signal_ends_the_process_at_once(first, second):
    script = (
        "import asyncio, sys; from core.process import until_signal\n"
        "async def serve(stop):\n"
        "    print('up', flush=True)\n"
        "    await stop.wait()\n"
        "    print('stopping', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(until_signal(serve))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(first)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(second)
        assert process.wait(10.0) == -second
