"""What a client finds at the endpoint beside Generate: health, reflection, model, messages."""

import asyncio
import json
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from core.completion import ChatMessage
from core.errors import Cancelled, DeadlineExceeded, DuplicateRequest, InvalidRequest
from core.events.event import EventKind
from core.events.timeline import Timeline
from core.listing import WorkerState
from core.request import FinishReason, id_of_attempt
from core.request_state import RequestState
from deploy.cli import app
from tests.e2e.conftest import StartCluster
from tests.e2e.nothing_left import assert_nothing_left
from twophase.client import AsyncClient, Client, Sampling

SETUP = ("decode.kv_cache=2MiB", "prefill.kv_cache=2MiB", "engine.max_context_tokens=512")


def test_health_says_serving_once_a_token_went_through_both_pools(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with grpc.insecure_channel(cluster.address) as channel:
        request = health_pb2.HealthCheckRequest(service="twophase.v1.Inference")
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    with Client(cluster.address) as client:
        workers = {worker.role: worker for worker in client.status().workers}

    assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert workers["prefill"].num_steps > 0
    assert workers["decode"].num_steps > 0
    assert workers["decode"].num_transfer_bytes > 0


def test_reflection_lists_the_services(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with grpc.insecure_channel(cluster.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(stub.ServerReflectionInfo(asked, timeout=5))
    names = {service.name for service in answer.list_services_response.service}

    assert {"twophase.v1.Inference", "twophase.v1.Admin", "grpc.health.v1.Health"} <= names


def test_the_model_is_told_with_its_limits(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        info = client.model()

    assert info.model == str(tiny_model_directory)
    assert (info.vocab_size, info.max_context_tokens) == (512, 512)
    assert info.mode == "disaggregated"


def test_both_clients_give_the_same_answer_in_text_chat_and_token_ids(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    prompts = ("Hello there", [ChatMessage("user", "Hello there")], [5, 6, 7])
    sampling = Sampling(max_tokens=8, ignore_eos=True)

    async def ask_async() -> list[str]:
        async with AsyncClient(cluster.address) as client:
            return [
                "".join([chunk.text async for chunk in client.generate(prompt, sampling)])
                for prompt in prompts
            ]

    with Client(cluster.address) as client:
        answers = [
            "".join(chunk.text for chunk in client.generate(prompt, sampling)) for prompt in prompts
        ]

    assert answers == asyncio.run(ask_async())
    assert len(set(answers)) == 3
    asyncio.run(assert_nothing_left(cluster.address))


def test_the_answer_in_one_message_is_the_streamed_one_also_through_both_clients(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    sampling = Sampling(max_tokens=9, ignore_eos=True, num_logprobs=2)

    async def ask_async() -> tuple[str, tuple[int, ...]]:
        async with AsyncClient(cluster.address) as client:
            answer = await client.generate_once("Hello there", sampling)
            return answer.text, answer.token_ids

    with Client(cluster.address) as client:
        chunks = list(client.generate("Hello there", sampling))
        once = client.generate_once("Hello there", sampling, request_id="once")

    assert once.text == "".join(chunk.text for chunk in chunks)
    assert once.token_ids == tuple(i for chunk in chunks for i in chunk.token_ids)
    assert once.logprobs == tuple(each for chunk in chunks for each in chunk.logprobs)
    assert once.completion is not None and once.completion.request_id == "once"
    assert once.completion.usage.num_output_tokens == 9
    assert asyncio.run(ask_async()) == (once.text, once.token_ids)
    asyncio.run(assert_nothing_left(cluster.address))


def test_text_becomes_the_tokens_that_a_request_is_served_for_and_tokens_become_its_text(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    chat = [ChatMessage("user", "<|im_end|> Hello")]
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    with Client(cluster.address) as client:
        for prompt in ("Hello there", chat):
            token_ids = client.tokenize(prompt)
            asked = client.generate_once(prompt, sampling)
            assert asked.completion is not None
            assert asked.completion.usage.num_prompt_tokens == len(token_ids)
            assert client.generate_once(token_ids, sampling).token_ids == asked.token_ids
            assert client.detokenize(asked.token_ids) == asked.text
        assert client.detokenize([]) == ""
        for refused in (
            lambda: client.tokenize(""),
            lambda: client.tokenize([]),
            lambda: client.tokenize("x" * 20_000),
            lambda: client.tokenize("x", model="gpt-5"),
            lambda: client.detokenize([512]),
            lambda: client.detokenize([5] * 513),
        ):
            with pytest.raises(InvalidRequest):
                refused()

    async def round_trip() -> str:
        async with AsyncClient(cluster.address) as client:
            return await client.detokenize(await client.tokenize("Hello there"))

    assert asyncio.run(round_trip()) == "Hello there"


def test_a_running_request_is_listed_and_ended_by_its_id_with_what_was_known(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    sampling = Sampling(max_tokens=400, ignore_eos=True)
    with Client(cluster.address) as client:
        stream = client.generate([1, 2, 3], sampling, request_id="mine", timeout_s=50.0)
        token_ids = [*next(stream).token_ids, *next(stream).token_ids]
        with pytest.raises(DuplicateRequest):
            client.generate_once([1], request_id="mine")
        [listed] = client.admin.requests()
        is_found = client.cancel("mine")
        with pytest.raises(Cancelled) as end:
            for chunk in stream:
                token_ids += chunk.token_ids
        assert not client.cancel("mine")
        assert not client.cancel("never was")
        assert client.admin.requests() == []

    assert is_found
    assert (listed.request_id, listed.state) == ("mine", RequestState.DECODING)
    assert (listed.prefill_worker, listed.decode_worker) == ("prefill-0", "decode-0")
    assert (listed.num_prompt_tokens, listed.num_attempts) == (3, 1)
    assert listed.num_output_tokens >= 2
    # gRPC rounds a timeout up to three digits on its way.
    assert listed.remaining_s is not None and 0 < listed.remaining_s < 50.5
    known = end.value.completion
    assert known is not None and known.finish_reason is FinishReason.ERROR
    assert known.usage.num_output_tokens == len(token_ids)
    assert known.phases.prefill_s > 0
    asyncio.run(assert_nothing_left(cluster.address))


def test_a_drained_worker_is_given_nothing_new_and_what_it_serves_goes_on(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP, "prefill.replicas=2")
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    with Client(cluster.address) as client:
        workers = {worker.name: worker for worker in client.admin.workers()}
        assert workers.keys() == {"prefill-0", "prefill-1", "decode-0"}
        assert {worker.state for worker in workers.values()} == {WorkerState.READY}
        client.admin.drain("prefill-1")
        client.admin.drain("prefill-1")  # idempotent
        used = {
            client.generate_once([number], sampling).completion.prefill_worker
            for number in range(6)
        }
        states = {worker.name: worker.state for worker in client.admin.workers()}
        with pytest.raises(InvalidRequest):
            client.admin.drain("prefill-9")

    assert used == {"prefill-0"}
    assert states["prefill-1"] is WorkerState.DRAINING
    asyncio.run(assert_nothing_left(cluster.address))


def test_a_deadline_ends_the_request_with_deadline_exceeded_and_frees_everything(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        chunks = client.generate([1], Sampling(max_tokens=500, ignore_eos=True), timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            list(chunks)

    asyncio.run(assert_nothing_left(cluster.address))


def test_the_audit_names_who_holds_blocks_while_a_stream_runs(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    with Client(cluster.address) as client:
        stream = client.generate([1, 2, 3], sampling, request_id="audited")
        next(stream)
        next(stream)
        audited = client.audit_blocks()
        stream.close()

    held = {(h.worker, h.state): (id_of_attempt(h.request_id), orphan) for h, orphan in audited}
    assert held["decode-0", "running"] == ("audited", False)
    assert all(h.num_blocks > 0 and h.epoch > 0 and h.age_s >= 0 for h, _ in audited)
    asyncio.run(assert_nothing_left(cluster.address))


def test_links_are_bounded_closed_when_idle_and_made_again(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    # Each of the two decode workers is probed, so the only link has to change hands.
    cluster = start_cluster(
        tiny_model_directory,
        *SETUP,
        *("decode.replicas=2", "transfer.max_links=1", "transfer.idle_timeout_s=1"),
    )

    def links(client: Client) -> int:
        workers = client.status().workers
        return sum(len(worker.links) for worker in workers if worker.role == "prefill")

    with Client(cluster.address) as client:
        for number in range(4):
            list(client.generate([number, 2], Sampling(max_tokens=3, ignore_eos=True)))
        num_used = links(client)
        deadline_s = time.monotonic() + 10
        while links(client) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        num_idle = links(client)
        list(client.generate([9, 9], Sampling(max_tokens=3, ignore_eos=True)))
        steps = [w.num_transfer_bytes for w in client.status().workers if w.role == "decode"]

    assert num_used <= 1
    assert num_idle == 0
    assert len(steps) == 2 and all(steps)
    asyncio.run(assert_nothing_left(cluster.address))


@pytest.mark.parametrize("setup", ["transfer.backend=torch", "decode.tensor_parallel=2"])
def test_every_server_listens_on_loopback_only(
    tiny_model_directory: Path, start_cluster: StartCluster, setup: str
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP, setup)
    parents = [psutil.Process(child.process.pid) for child in cluster.children.values()]
    processes = [p for parent in parents for p in (parent, *parent.children(recursive=True))]
    addresses = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert len(addresses) >= 4
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}


def _length_s(timeline: Timeline, *kinds: EventKind) -> float:
    return sum(event.duration_s for event in timeline.events if event.kind in kinds)


def _ask_timed(client: Client, number: int) -> tuple[Timeline, float]:
    """An ordinary request's timeline, and how much longer its client waited than that tells."""
    began_s = time.monotonic()
    prompt = tuple((number + 7 * place) % 400 + 3 for place in range(200))
    chunks = list(client.generate(prompt, Sampling(max_tokens=250, ignore_eos=True)))
    waited_s = time.monotonic() - began_s
    assert chunks[-1].completion is not None
    timeline = client.admin.timeline(chunks[-1].completion.request_id)
    assert timeline.completion == chunks[-1].completion
    return timeline, waited_s - timeline.completion.phases.total_s


def test_phases_add_up_agree_with_the_clients_clock_and_are_what_the_events_show(
    tiny_model_directory: Path, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(tiny_model_directory, *SETUP)
    with Client(cluster.address) as client:
        asked = [_ask_timed(client, number) for number in range(4)]
        with pytest.raises(InvalidRequest, match="no request with this id"):
            client.admin.timeline("nobody")
    # What a busy machine adds to the hops between four processes is not the product's: the best of
    # four has to be within 2 %, of half a second in which a hop takes less than a millisecond.
    phases = [timeline.completion.phases for timeline, _ in asked]
    assert min(abs(p.unaccounted_s) / p.total_s for p in phases) < 0.02
    assert 0 <= min(longer_s / t.completion.phases.total_s for t, longer_s in asked) < 0.02

    for timeline, _ in asked:
        _assert_events_show_the_phases(timeline)
        assert {(clock.worker, clock.offset_s) for clock in timeline.clocks} == {
            ("prefill-0", 0.0),
            ("decode-0", 0.0),
        }
        _assert_in_order(timeline)
    asyncio.run(assert_nothing_left(cluster.address))


def _assert_events_show_the_phases(timeline: Timeline) -> None:
    completion, kind = timeline.completion, EventKind
    phases, transfer = completion.phases, completion.transfer
    chunks = [event for event in timeline.events if event.kind is kind.CHUNK]
    steps = [event for event in timeline.events if event.kind in (kind.STEPS, kind.GAP)]
    assert transfer is not None
    for shown_s, phase_s in (
        (_length_s(timeline, kind.TOKENIZE), phases.tokenize_s),
        (_length_s(timeline, kind.LINE), phases.place_s),
        (_length_s(timeline, kind.RESERVE), phases.reserve_s),
        (sum(chunk.busy_s for chunk in chunks), phases.prefill_s),
        (chunks[-1].end_s - chunks[0].begin_s, _after_queue_s(timeline)),
        (_length_s(timeline, kind.TRANSFER), phases.exposed_transfer_s),
        (_length_s(timeline, kind.SLOT_WAIT), phases.slot_wait_s),
        (_length_s(timeline, kind.STEPS, kind.GAP), phases.decode_s),
        (_length_s(timeline, kind.LAST_TOKEN), phases.delivery_s),
    ):
        assert shown_s == pytest.approx(phase_s, abs=1e-6)
    pushed = sum(event.num_bytes for event in timeline.events if event.kind is kind.PUSH)
    assert pushed == transfer.num_bytes
    num_read = completion.usage.num_prompt_tokens - completion.usage.num_prefill_cached_tokens
    assert sum(chunk.num_tokens for chunk in chunks) == num_read
    assert sum(event.count for event in steps) == completion.usage.num_output_tokens - 1


def _after_queue_s(timeline: Timeline) -> float:
    phases = timeline.completion.phases
    return phases.queue_s + phases.prefill_s - _length_s(timeline, EventKind.QUEUE)


def _assert_in_order(timeline: Timeline) -> None:
    """One clock: nothing happens before its cause, as far as the clocks are known."""
    first = {event.kind: event for event in reversed(timeline.events)}
    kind = EventKind
    way = (kind.RECEIVED, kind.TOKENIZE, kind.LINE, kind.PLACED, kind.RESERVE, kind.QUEUE)
    way = (*way, kind.CHUNK, kind.SEALED, kind.SLOT_WAIT, kind.STEPS, kind.LAST_TOKEN, kind.END)
    for before, after in zip(way, way[1:], strict=False):
        slack_s = first[before].uncertainty_s + first[after].uncertainty_s + 1e-6
        assert first[before].begin_s <= first[after].begin_s + slack_s, (before, after)
    assert timeline.events[-1].kind is kind.END


def test_a_request_is_shown_as_a_waterfall_and_all_of_them_in_a_file_for_perfetto(
    tiny_model_directory: Path, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster, path = start_cluster(tiny_model_directory, *SETUP), tmp_path / "trace.json"
    log = tmp_path / "scaling.jsonl"
    with Client(cluster.address) as client:
        timeline, _ = _ask_timed(client, 9)
    decision = {"now_s": timeline.now_s, "sentence": "decode 1 -> 2", "actions": [{}]}
    log.write_text("\n".join(map(json.dumps, [decision, {**decision, "actions": []}])))
    request_id, at = timeline.completion.request_id, ("--address", cluster.address)

    shown = CliRunner().invoke(app, ["timeline", request_id, *at])
    wrote = CliRunner().invoke(
        app, ["timeline", "--perfetto", str(path), "--scaling-log", str(log), *at]
    )

    assert shown.exit_code == wrote.exit_code == 0, (shown.output, wrote.output)
    for part in (request_id, "router", "prefill-0", "decode-0", "chunk", "layers 0-", "steps"):
        assert part in shown.output
    assert "1 scaling decisions" in wrote.output
    events = json.loads(path.read_text())["traceEvents"]
    assert {f"request {request_id}", f"chunk of {request_id}", "step"} <= {
        e["name"] for e in events
    }
    # one clock: the engine's steps are the ones that the request's own events tell of
    own = [event for event in events if event.get("args", {}).get("request_id") == request_id]
    runs = [event for event in own if event["name"].startswith(("steps", "gap"))]
    steps = [event for event in events if event.get("cat") == "decode steps"]
    assert runs[-1]["ts"] + runs[-1]["dur"] == pytest.approx(
        max(step["ts"] + step["dur"] for step in steps), abs=1.0
    )
    assert CliRunner().invoke(app, ["timeline", *at]).exit_code == 2
