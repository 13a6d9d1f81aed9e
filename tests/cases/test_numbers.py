"""Numbers that people act on: each is what happened, no more and no less."""

import asyncio
import contextlib
import logging
import re
import time
from contextlib import asynccontextmanager

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from bench.parity import wait_until_ready
from core.errors import DeadlineExceeded, PeerLost, TransferFailed
from tests.cases.one_process import prompt_of, until
from tests.cases.scrape import scrape
from tests.contract.faulty import Fault, FaultKind, Step
from twophase.client import Sampling
from twophase.v1 import inference_pb2, inference_pb2_grpc

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
BLOCK_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * BLOCK_SIZE * 4


def busy(told):
    """Gauges that are zero where nothing is done."""
    workers = ("prefill-0", "decode-0")
    return [
        *(told(f"requests_{state}") for state in ("running", "waiting")),
        *(told("worker_requests", worker=name, state="running") for name in workers),
        *(told("worker_requests", worker=name, state="waiting") for name in workers),
        *(told("kv_blocks", worker=name, state="used") for name in workers),
        *(told("worker_oldest_wait_seconds", worker=name) for name in workers),
    ]


@pytest.mark.case("B-119")
async def test_what_the_service_tells_of_a_request_is_what_its_client_waited(run):
    """A second in the transfer and one before the first decode step: parts of the whole."""
    async with run("shm", "router.http_port=0") as cluster:
        # a step of another request holds up the decode queue, from before ours comes
        other = asyncio.create_task(cluster.ask(prompt_of(20, 0), max_tokens=900))
        await cluster.until_count("decode-0", "num_running_requests", bool)
        # again where the machine was too busy to read a message at once
        for number in range(1, 4):
            before = await scrape(cluster)
            cluster.faults.order(Fault(Step.SEND, FaultKind.SLEEP, seconds=1.0))
            with contextlib.ExitStack() as held:
                held.enter_context(cluster.devices["decode-0"].held())
                asyncio.get_running_loop().call_later(2.2, held.close)
                began_s = time.monotonic()
                answer = await cluster.ask(prompt_of(20, number), max_tokens=4)
                client_s = time.monotonic() - began_s
            cluster.faults.order()
            phases = answer.completion.phases
            if client_s - phases.accounted_s < 0.05 * client_s:
                break
        assert phases.exposed_transfer_s == pytest.approx(1.0, abs=0.3)
        assert phases.slot_wait_s == pytest.approx(1.1, abs=0.3)
        assert phases.accounted_s <= phases.total_s <= client_s
        assert client_s - phases.accounted_s < 0.05 * client_s
        # the metrics have the same seconds, under the same names, and no more
        after = await scrape(cluster)

        def added(name, **labels):
            return after(name, **labels) - before(name, **labels)

        assert added("request_seconds_sum") == pytest.approx(phases.total_s)
        for phase, seconds in phases.items():
            assert added("phase_seconds_sum", phase=phase) == pytest.approx(seconds)
        assert added("kv_transfer_exposed_seconds_sum", backend="shm") == pytest.approx(
            phases.exposed_transfer_s
        )
        assert added("queue_wait_seconds_sum", phase="decode") == pytest.approx(phases.slot_wait_s)
        # the first token did not wait for all that: it comes from prefill
        assert added("time_to_first_token_seconds_sum") < 1.0
        other.cancel()
        await asyncio.wait([other])


@pytest.mark.case("B-121")
async def test_each_failure_is_counted_once_by_its_reason(run):
    async with run("shm", "router.http_port=0") as cluster:
        await cluster.ask(prompt_of(20, 0), max_tokens=2)
        pair = {"prefill": "prefill-0", "decode": "decode-0"}

        async def counted():
            told = await scrape(cluster)
            return {
                **{
                    reason: told("attempt_failures_total", reason=reason, **pair)
                    for reason in ("peer_lost", "checksum", "link_lost", "lease_expired", "refused")
                },
                "sealed": told("handoffs_total", outcome="sealed"),
                "failed": told("handoffs_total", outcome="failed"),
                "late": told("requests_total", outcome="deadline_exceeded"),
                "well": told("requests_total", outcome="length"),
            }

        async def fails(number, error, fault, **limit):
            cluster.faults.order(fault)
            answer = await cluster.ask(prompt_of(20, number), max_tokens=2, **limit)
            assert isinstance(answer.error, error)
            assert cluster.faults.num_struck == 1
            cluster.faults.order()
            await cluster.nothing_is_left()
            await wait_until_ready(cluster.client)

        before = await counted()
        for number in range(3):  # handshakes
            cluster.break_links()
            await until(lambda: cluster.num_open_senders == 0)
            await fails(10 + number, PeerLost, Fault(Step.CONNECT, FaultKind.RAISE))
            assert (await cluster.ask(prompt_of(20, 20 + number), max_tokens=2)).error is None
        for number in range(2):  # transfers
            await fails(30 + number, TransferFailed, Fault(Step.PIECE, FaultKind.CORRUPT))
        # and one that is never sealed
        await fails(40, DeadlineExceeded, Fault(Step.SEAL, FaultKind.DROP), timeout_s=0.8)
        after = await counted()
        added = {name: after[name] - before[name] for name in after}
        assert added == {
            **dict.fromkeys(before, 0),
            **{"peer_lost": 3, "checksum": 2, "late": 1},
            **{"failed": 2, "sealed": 3, "well": 3},
        }


@pytest.mark.case("B-122")
async def test_after_all_were_cancelled_at_once_the_gauges_are_zero_and_work_is_sent_again(
    run, reference
):
    async with run("shm", "router.http_port=0") as cluster:
        asked = [
            asyncio.create_task(cluster.ask(prompt_of(20, number), max_tokens=400))
            for number in range(64)
        ]
        await cluster.until_count("decode-0", "num_running_requests", bool)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await cluster.nothing_is_left()
        for worker in (await cluster.statuses()).values():
            assert worker.num_waiting_requests == worker.num_running_requests == 0
            assert worker.num_used_blocks == worker.num_waiting_prompt_tokens == 0
        for worker in await cluster.client.admin.workers():
            assert worker.num_requests == worker.num_prompt_tokens == 0
        # without any traffic the gauges are told as low as they are
        async with asyncio.timeout(10):
            while any(busy(await scrape(cluster))):
                await asyncio.sleep(0.1)
        answer = await cluster.ask(prompt_of(20, 100), max_tokens=4)
        assert answer.token_ids == reference(prompt_of(20, 100), 4)


@pytest.mark.case("B-124", "B-127")
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_what_was_moved_is_no_prefix_hit_and_its_bytes_are_those_of_all_ranks(run, num_ranks):
    prompt = prompt_of(40, 7)
    ranks = f"decode.tensor_parallel={num_ranks}"
    async with run("shm", "router.http_port=0", ranks) as cluster:
        first, again = [(await cluster.ask(prompt, max_tokens=3)).completion for _ in range(2)]
        assert first.usage.num_decode_cached_tokens == first.usage.num_prefill_cached_tokens == 0
        assert first.usage.num_transferred_tokens == 40
        assert first.transfer.num_bytes == 3 * BLOCK_BYTES
        for usage in (first.usage, again.usage):
            assert usage.num_decode_cached_tokens + usage.num_transferred_tokens == 40
            assert usage.num_prefill_cached_tokens <= 40
        assert again.usage.num_decode_cached_tokens == 32
        assert again.transfer.num_bytes == BLOCK_BYTES
        told = await scrape(cluster)
        assert told("kv_transfer_bytes_total", backend="shm") == 4 * BLOCK_BYTES
        moved = sum(worker.num_transfer_bytes for worker in (await cluster.statuses()).values())
        # both ends count what went over their link; the probes before were of one block or two
        assert moved >= 2 * 4 * BLOCK_BYTES and moved % (2 * BLOCK_BYTES) == 0
        await cluster.nothing_is_left()


@pytest.mark.case("B-127")
async def test_a_handoff_that_is_tried_again_counts_its_bytes_once_and_its_failure_apart(run):
    two = ("prefill.replicas=2", "router.on_failure=resume")
    async with run("shm", "router.http_port=0", *two) as cluster:
        before = await scrape(cluster)
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        answer = await cluster.ask(prompt_of(40, 7), max_tokens=3)
        told = await scrape(cluster)
        assert answer.error is None and len(answer.completion.failures) == 1
        assert told("kv_transfer_bytes_total", backend="shm") == 3 * BLOCK_BYTES
        assert told("handoffs_total", outcome="sealed") == 1
        assert told("handoffs_total", outcome="failed") == 1
        failed = {
            key: value - before.values.get(key, 0)
            for key, value in told.values.items()
            if key[0] == "attempt_failures_total"
        }
        [(key, count)] = failed.items()
        assert count == 1 and ("reason", "checksum") in key
        assert ("prefill", answer.completion.prefill_worker) not in key
        assert told("failed_attempts_total") == 1
        await cluster.nothing_is_left()


@pytest.mark.case("B-126")
async def test_output_tokens_are_those_that_were_sent_however_it_ended(run, reference):
    prompt = prompt_of(20, 3)
    right = reference(prompt, 8)
    async with run("shm", "router.http_port=0") as cluster:
        for max_tokens in (1, 2, 8):
            answer = await cluster.ask(prompt, max_tokens=max_tokens)
            assert answer.completion.usage.num_output_tokens == len(answer.token_ids) == max_tokens
        stopped = await cluster.ask(prompt, max_tokens=8, stop_token_ids=(right[3],))
        assert stopped.completion.usage.num_output_tokens == right.index(right[3]) + 1
        # a stop string: the ids that were sent, whatever was taken out of the text
        whole = await cluster.client.generate_once(prompt, Sampling(max_tokens=8, ignore_eos=True))
        ended = await cluster.ask(prompt, max_tokens=8, stop=(whole.text[2:4],))
        assert ended.is_stopped
        assert ended.completion.usage.num_output_tokens == len(ended.token_ids) < 8
        # a client that leaves: what was sent until then, which it may not have read
        leaving = asyncio.create_task(cluster.ask(prompt, max_tokens=900, request_id="left"))
        await cluster.until_count("decode-0", "num_running_requests", bool)
        leaving.cancel()
        await asyncio.wait([leaving])
        await cluster.nothing_is_left()
        left = (await cluster.client.admin.explain("left")).completion
        told = await scrape(cluster)
        known = 1 + 2 + 8 + len(stopped.token_ids) + 8 + len(ended.token_ids)
        assert told("output_tokens_total") == known + left.usage.num_output_tokens
        # an error in decode, after some tokens
        device = cluster.devices["decode-0"]
        broken_off = asyncio.create_task(cluster.ask(prompt, max_tokens=900))
        await cluster.until_count("decode-0", "num_running_requests", bool)
        device.error = "ordered"
        failed = await broken_off
        device.error = None
        assert failed.error.completion.usage.num_output_tokens == len(failed.token_ids) >= 1
        # an error before the first token, and one after it
        device = cluster.devices["prefill-0"]
        step, device._step = device._step, broken
        failed = await cluster.ask(prompt_of(20, 4), max_tokens=8)
        device._step = step
        assert failed.error.completion.usage.num_output_tokens == len(failed.token_ids) == 0
        await cluster.nothing_is_left()  # a probe of readiness would meet the fault
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        failed = await cluster.ask(prompt_of(20, 5), max_tokens=8)
        assert isinstance(failed.error, TransferFailed)
        assert failed.error.completion.usage.num_output_tokens == len(failed.token_ids) <= 1
        await cluster.nothing_is_left()


def broken(*arguments):
    raise RuntimeError("ordered")


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HTTP_TRACE = "8" * 32


@asynccontextmanager
async def collector():
    """An OTLP collector: where it listens, and (trace id, service) of each span that it gets."""
    spans = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        async def Export(self, request, context):
            for of_service in request.resource_spans:
                told = {
                    pair.key: pair.value.string_value for pair in of_service.resource.attributes
                }
                for scope in of_service.scope_spans:
                    spans.extend((s.trace_id.hex(), told["service.name"]) for s in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", spans
    finally:
        await server.stop(None)


async def ask_traced(cluster, request_id, traceparent):
    """One answer to a client that traces."""
    ids = inference_pb2.TokenIds(ids=prompt_of(20, 1))
    sampling = inference_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
    asked = inference_pb2.GenerateRequest(
        request_id=request_id, prompt_token_ids=ids, sampling=sampling
    )
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = inference_pb2.GenerateOnceRequest(request=asked)
        await stub.GenerateOnce(message, metadata=(("traceparent", traceparent),))


async def ask_traced_over_http(cluster, traceparent):
    """The same over HTTP."""
    address = (await cluster.client.status()).http_address
    message = {"prompt": prompt_of(20, 3), "max_tokens": 3}
    async with httpx2.AsyncClient() as http:
        headers = {"traceparent": traceparent}
        reply = await http.post(f"http://{address}/v1/completions", json=message, headers=headers)
    assert reply.status_code == 200


@pytest.mark.case("B-129")
async def test_one_id_leads_through_the_logs_of_all_three_and_one_trace_through_the_spans(
    run, caplog
):
    caplog.set_level(logging.INFO)
    async with (
        collector() as (endpoint, spans),
        run("shm", f"tracing.endpoint={endpoint}", "router.http_port=0") as cluster,
    ):
        await ask_traced(cluster, "whole", f"00-{TRACE}-{'1' * 16}-01")
        await ask_traced(cluster, "unsampled", f"00-{'7' * 32}-{'1' * 16}-00")
        await ask_traced_over_http(cluster, f"00-{HTTP_TRACE}-{'1' * 16}-01")
        await cluster.ask(prompt_of(20, 1), max_tokens=3, request_id="begun")
        cluster.faults.order(Fault(Step.PIECE, FaultKind.CORRUPT))
        await cluster.ask(prompt_of(20, 2), max_tokens=3, request_id="broken")
        cluster.faults.order()
        await cluster.nothing_is_left()
    said = [(record.name, record.getMessage()) for record in caplog.records]
    whole = {who for who, what in said if "request whole" in what}
    assert whole == {"twophase.router", "twophase.prefill_worker", "twophase.decode_worker"}
    # workers mark an id that the client chose: it may be used again
    told = re.compile(rf"request whole(~[0-9a-f]+-1)? \(trace {TRACE}\)")
    assert all(told.search(what) for _, what in said if "request whole" in what)
    (begun,) = {what.split("(trace ")[1][:32] for _, what in said if "request begun" in what}
    # one trace for each request, of which each part of the cluster has spans
    own = {trace_id: {s for t, s in spans if t == trace_id} for trace_id, _ in spans}
    everywhere = {"twophase-router", "twophase-prefill", "twophase-decode"}
    assert own[TRACE] == own[begun] == own[HTTP_TRACE] == everywhere
    assert "7" * 32 not in own
    # prefill says nothing of a call that the router took back before it heard of the failure
    broken = {who for who, what in said if "request broken" in what}
    assert broken >= {"twophase.router", "twophase.decode_worker"}
