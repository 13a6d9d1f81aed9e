"""/metrics tells what clients saw, in numbers that add up; and zero when nothing is there."""

import asyncio

import pytest

from core.errors import InvalidRequest, TransferFailed
from tests.cases.one_process import prompt_of
from tests.cases.scrape import scrape
from tests.contract.faulty import Fault, FaultKind, Step
from twophase.client import Sampling

PROMPT = prompt_of(75, 119)
DECODE = {"worker": "decode-0"}
IDLE = {"requests_running": 0.0, "requests_waiting": 0.0, "ready": 1.0}


async def test_what_is_told_is_what_clients_saw(run):
    async with run("shm", "router.http_port=0") as cluster:
        # 1 nothing yet: counters are there, at zero
        before = await scrape(cluster)
        assert before("output_tokens_total") == 0
        assert {name: before(name) for name in IDLE} == IDLE
        # 2 two answers to one prompt: the prompt once, tokens and phases of both
        answers = await cluster.client.generate_all(
            PROMPT, Sampling(max_tokens=9, n=2, temperature=0.5, ignore_eos=True)
        )
        first, second = (answer.completion for answer in answers)
        told = await scrape(cluster)
        assert told("requests_total", outcome="length") == 1
        assert told("prompt_tokens_total") == len(PROMPT)
        assert told("output_tokens_total") == 18
        assert told("time_to_first_token_seconds_count") == 2
        assert told("time_to_first_token_seconds_sum") == pytest.approx(
            first.phases.time_to_first_token_s + second.phases.time_to_first_token_s, abs=0.02
        )
        assert 2 <= told("inter_token_latency_seconds_count") <= 16
        assert told("request_seconds_count") == 2
        phases = [key for key in told.values if key[0] == "phase_seconds_sum"]
        total = sum(told.values[key] for key in phases)
        assert total == pytest.approx(told("request_seconds_sum"), abs=0.05)
        assert told("prefill_seconds_count", input_length="128") == 2
        assert told("queue_wait_seconds_sum", phase="prefill") == pytest.approx(
            first.phases.queue_s + second.phases.queue_s
        )
        assert told("kv_transfer_bytes_total", backend="shm") == first.transfer.num_bytes > 0
        assert told("kv_transfer_exposed_seconds_sum", backend="shm") == first.transfer.exposed_s
        assert told("decode_kv_tokens_total", source="transferred") == len(PROMPT)
        assert told("decode_kv_tokens_total", source="local") == len(PROMPT) % 16
        assert told("handoffs_total", outcome="sealed") == 1


async def test_what_workers_counted_comes_with_their_next_heartbeat(run):
    async with run("shm", "router.http_port=0") as cluster:
        # beside the router's probe: one answer over the link, one that decode reads itself
        answers = await cluster.client.generate_all(
            PROMPT, Sampling(max_tokens=9, n=2, temperature=0.5, ignore_eos=True)
        )
        first = answers[0].completion
        link = {"prefill": "prefill-0", "decode": "decode-0", "backend": "shm"}
        async with asyncio.timeout(10):
            while (told := await scrape(cluster))("worker_output_tokens_total", **DECODE) < 17:
                await asyncio.sleep(0.1)
        assert told("link_bytes_total", **link) > first.transfer.num_bytes
        assert told("link_transfer_seconds_count", **link) == 2
        assert told("link_wait_seconds_sum", **link) >= first.transfer.exposed_s
        assert told("link_bandwidth_bytes_per_second", **link) > 0
        assert told("kv_in_flight_bytes", worker="prefill-0") == 0
        for worker in ("prefill-0", "decode-0"):
            assert 0 < told("model_load_seconds", worker=worker) < 60
        num_read = told("worker_prompt_tokens_total", worker="prefill-0", pool="prefill")
        assert num_read > len(PROMPT)
        # the other answer reads its prompt's last block at decode, perhaps in a mixed step
        kinds = ("prefill", "decode", "mixed")
        num_steps = [told("step_seconds_count", kind=kind, **DECODE) for kind in kinds]
        assert sum(num_steps) == told("worker_steps_total", pool="decode", **DECODE)
        assert num_steps[0] + num_steps[2] >= 1
        small = {"batch": "4", "history": "1024"}
        assert told("decode_step_seconds_count", **small, **DECODE) >= 1
        assert told("decode_step_kv_read_bytes_count", **DECODE) == sum(num_steps[1:])


async def test_failures_are_counted_once_each_and_no_gauge_stays_high(run):
    async with run("shm", "router.http_port=0") as cluster:
        # 1 a handoff that fails, a bad request, a client that leaves
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        failed = await cluster.ask(prompt_of(75, 121), max_tokens=4)
        assert isinstance(failed.error, TransferFailed)
        with pytest.raises(InvalidRequest):
            await cluster.client.generate_once(PROMPT, Sampling(top_p=2.0))
        leaving = asyncio.create_task(cluster.ask(PROMPT, max_tokens=900))
        await cluster.until_count("decode-0", "num_running_requests", lambda count: count == 1)
        running = await scrape(cluster)
        leaving.cancel()
        await asyncio.wait([leaving])
        await cluster.nothing_is_left()
        told = await scrape(cluster)
        assert running("requests_running") == 1
        assert told("handoffs_total", outcome="failed") == 1
        outcomes = ("length", "transfer_failed", "invalid_request", "cancelled")
        assert [told("requests_total", outcome=name) for name in outcomes] == [0, 1, 1, 1]
        assert told("prompt_tokens_total") == 2 * len(PROMPT)
        assert told("output_tokens_total") >= 1
        assert told("request_seconds_count") == 0
        # 2 within a heartbeat workers are told as idle as they are, blocks adding up to all
        async with asyncio.timeout(10):
            while (told := await scrape(cluster))("kv_blocks", worker="decode-0", state="used"):
                await asyncio.sleep(0.1)
        assert {name: told(name) for name in IDLE} == IDLE
        workers = await cluster.statuses()
        for name, status in workers.items():
            states = ("free", "cached", "used", "quarantined")
            blocks = [told("kv_blocks", worker=name, state=state) for state in states]
            assert sum(blocks) == status.num_total_blocks
            assert told("workers", pool=status.role, state="ready") == 1
            assert told("worker_requests", worker=name, state="running") == 0


async def test_turned_off_nothing_is_kept_and_answers_are_what_they_were(run, reference):
    async with run("shm", "router.http_port=0", "telemetry.enabled=false") as cluster:
        answer = await cluster.ask(PROMPT, max_tokens=9)
        assert answer.token_ids == reference(PROMPT, 9)
        phases = answer.completion.phases
        # phases of two processes may overlap by a hop
        assert phases.decode_s > 0 and phases.unaccounted_s > -0.02
        with pytest.raises(InvalidRequest):
            await cluster.client.admin.explain(answer.completion.request_id)
        told = await scrape(cluster)
        assert {name: told(name) for name in IDLE} == IDLE
        assert not [key for key in told.values if key[0].startswith(("requests_total", "phase"))]
        assert not [key for key in told.values if key[0].startswith("decode_step")]
        await cluster.nothing_is_left()
