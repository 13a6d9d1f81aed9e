"""The scenario itself, on a client that answers from a script, and the setups' configurations."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from bench import interference
from bench.interference import SETUPS, Observation, Seen, measure, observe, overview, remarks
from bench.interference_figure import draw
from bench.interference_result import Result, numbers_of
from bench.load import Arrival, StreamLog
from bench.machine import CpuUse
from core.completion import Chunk, Completion
from core.config import ClusterConfig, Mode
from core.errors import DeadlineExceeded
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases

WORKER = WorkerName("w")


def completion(num_prompt_tokens, num_output_tokens):
    return Completion(
        request_id=RequestId("r"),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(num_prompt_tokens, num_output_tokens, 0),
        phases=Phases(),
        transfer=None,
        prefill_worker=WORKER,
        decode_worker=WORKER,
        placement="",
        seed=0,
    )


class TurnClient:
    """Gives one token to each running request per turn of the event loop; notes what was asked."""

    def __init__(self):
        self.lengths = []
        self.tokens_at_long_prompt = None
        self._given = []

    async def generate(self, prompt, sampling, *, timeout_s):
        if len(prompt) == interference.LONG_PROMPT_TOKENS:
            self.tokens_at_long_prompt = list(self._given)
        self.lengths.append(len(prompt))
        index = len(self._given)
        self._given.append(0)
        for token in range(sampling.max_tokens):
            await asyncio.sleep(0)
            self._given[index] += 1
            last = token == sampling.max_tokens - 1
            yield Chunk("", (1,), completion(len(prompt), token + 1) if last else None)


async def test_the_long_prompt_arrives_when_every_stream_is_under_way():
    client = TurnClient()

    seen = await observe(client, random.Random(1), 49_152)

    assert client.lengths == [64] * 8 + [1800]
    assert min(client.tokens_at_long_prompt) >= interference.ARRIVAL_TOKENS
    assert max(client.tokens_at_long_prompt) < interference.STREAM_OUTPUT_TOKENS
    assert [log.num_tokens for log in seen.streams] == [200] * 8
    assert seen.is_covered


async def test_a_stream_that_fails_ends_the_round():
    class FailingClient(TurnClient):
        async def generate(self, prompt, sampling, *, timeout_s):
            is_third = len(self.lengths) == 2
            async for chunk in super().generate(prompt, sampling, timeout_s=timeout_s):
                if is_third:
                    raise ConnectionError("gone")
                yield chunk

    with pytest.RaisesGroup(ConnectionError):
        await observe(FailingClient(), random.Random(1), 49_152)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_setup_uses_both_cores_with_one_compute_thread_on_each(setup):
    config = setup.config(model="m", chunk_tokens=256)
    pools = [pool for pool in (config.prefill, config.decode) if pool is not None]

    used = [core for pool in pools for core in pool.cores]
    assert sorted(used) == list(interference.CORES)
    assert ClusterConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_chunk_budget_is_that_of_the_chunked_setups_alone():
    budgets = {
        setup.mode: setup.config(model="m", chunk_tokens=99).decode.max_batch_tokens
        for setup in SETUPS
    }

    assert budgets[Mode.CHUNKED] == 99
    assert budgets[Mode.COLOCATED] != 99


def seen_with(*, streams=None, other_cores=0.0):
    steady = StreamLog(0.0, [Arrival(1.0 + 0.05 * i, 1) for i in range(60)])
    long = StreamLog(2.0, [Arrival(3.0, 1), Arrival(3.05, 1)], completion(1800, 2))
    return Observation(streams or (steady,) * 8, long, CpuUse(1.5, other_cores, 0.0))


def test_a_quiet_machine_and_single_tokens_need_no_remark():
    assert remarks([Seen(SETUPS[0], [seen_with()])]) == []


def test_remarks_name_what_spoils_a_number():
    short = StreamLog(0.0, [Arrival(1.0 + 0.1 * i, 2) for i in range(15)])
    rounds = [seen_with(other_cores=0.7), seen_with(streams=(short,))]

    lines = remarks([Seen(SETUPS[0], rounds, ["round 3: gone"])])

    assert [line.partition(":")[0] for line in lines] == ["failed", "noisy", "short", "joined"]
    assert "round 3: gone" in lines[0]
    assert "0.70, 0.00 cores" in lines[1]
    assert "15 of 495 messages" in lines[3]


async def test_setups_take_turns_and_a_failed_round_does_not_end_the_others(monkeypatch):
    turns = []

    class FleetClient(TurnClient):
        """Warm at once; setups are told apart by their address."""

        def __init__(self, address):
            super().__init__()
            self.address = address

        async def __aenter__(self):
            turns.append(self.address)
            return self

        async def __aexit__(self, *exc):
            pass

        async def status(self):
            return SimpleNamespace(is_ready=True)

        async def model(self):
            return SimpleNamespace(vocab_size=49_152)

        async def generate(self, prompt, sampling, *, timeout_s):
            if self.address == "b" and turns.count("b") == 2:
                raise DeadlineExceeded("too slow")
            async for chunk in super().generate(prompt, sampling, timeout_s=timeout_s):
                yield chunk

    monkeypatch.setattr(interference, "AsyncClient", FleetClient)

    seen = await measure([(SETUPS[0], "a"), (SETUPS[1], "b")], num_rounds=2, seed=1)

    assert turns == ["a", "b"] * 3
    assert [len(of_setup.rounds) for of_setup in seen] == [2, 1]
    assert [of_setup.failures for of_setup in seen] == [[], ["round 1: too slow"]]


def test_the_overview_has_a_column_for_each_setup():
    rounds = (numbers_of(seen_with()),)

    table = overview([Result(name, rounds, None, False) for name in ("one 1x1", "two 2x1")])

    assert [column.header for column in table.columns][1:] == ["one\n1x1", "two\n2x1"]
    assert table.row_count == len(interference.MEASURES)


def test_the_figure_is_a_png_with_a_panel_for_each_setup(tmp_path):
    path = tmp_path / "figures" / "interference.png"

    draw({"one": seen_with(), "two": seen_with()}, path)

    assert path.read_bytes().startswith(b"\x89PNG")
