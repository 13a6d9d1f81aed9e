"""Lives of HTTP requests over the real fleet and dispatcher, driven as ASGI, without sockets."""

import asyncio
import json

import pytest
import tokenizers
from starlette.requests import Request
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from core.config import Mode
from core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    PeerLost,
    TransferFailed,
    TransferFailure,
)
from core.sampling import Sampling
from core.settings.router import OnFailure, RouterConfig
from core.worker import CancelRequest, RequestFailed, Reserve, Role
from router.config import FrontDoorConfig
from router.dispatch import Dispatcher
from router.generation import FrontDoor, Generation
from router.http.app import HttpApp
from router.http.reading import BodyReader
from router.incoming import Incoming
from router.request import Defaults
from router.running import RunningRequests
from router.telemetry.gauges import Gauges
from router.telemetry.history import History
from router.telemetry.recorder import Recorder
from router.telemetry.totals import KvCounters
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.tracing.traces import Traces
from tests.unit.router.doubles import (
    DONE,
    END,
    FIRST,
    TRANSFER_REPORT,
    reserved,
    token,
    until,
)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "prompt"}]
JSON = ((b"content-type", b"application/json"),)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
GONE = {"type": "http.disconnect"}


def make_tokenizer():
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend, template=ChatTemplate(TEMPLATE, special_tokens={}), eos_token_ids=())


def part(data, *, is_last):
    return {"type": "http.request", "body": data, "more_body": not is_last}


class Probe:
    is_ready = True


class Exchange:
    """One HTTP request: what the client sends, and what it has got so far."""

    def __init__(self, app, path, body=None, *, method="POST", headers=JSON, messages=None):
        self.sent, self._incoming = [], asyncio.Queue()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        for message in messages or [part(data, is_last=True)]:
            self._incoming.put_nowait(message)
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": list(headers),
        }
        self.task = asyncio.create_task(app(self.scope, self._incoming.get, self._send))

    async def _send(self, message):
        self.sent.append(message)

    def leave(self):
        self._incoming.put_nowait(GONE)

    async def end(self):
        async with asyncio.timeout(5):
            await self.task
        return self

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def data(self):
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def json(self):
        return json.loads(self.data)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        lines = self.data.decode().split("\n\n")
        return [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]


class World:
    """A front door over one prefill and one decode worker that speak when told to."""

    def __init__(self, generation, fleet, dispatcher, door, app):
        self.generation, self.fleet, self.dispatcher = generation, fleet, dispatcher
        self.door, self.app = door, app
        self.prefill = self.decode = None

    def post(self, path, body, **more):
        return Exchange(self.app, path, body, **more)

    def get(self, path):
        return Exchange(self.app, path, method="GET", headers=())

    async def reserved(self):
        """The next request has asked decode for blocks; returns it."""
        await until(lambda: any(isinstance(c, Reserve) for c in self.decode.commands))
        return next(c.request for c in self.decode.commands if isinstance(c, Reserve))

    async def first_token(self, token_id=100):
        request = await self.reserved()
        self.decode.update(reserved(request.request_id))
        await until(lambda: self.prefill.calls)
        first = type(FIRST)(token_id, FIRST.report)
        self.prefill.calls[-1].say(first, TRANSFER_REPORT, END)
        return request

    async def all_tokens(self, *token_ids):
        request = await self.first_token(token_ids[0])
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids[1:], start=1):
            done = DONE if index == last else None
            event = token(index, request_id=request.request_id, token_id=token_id, done=done)
            self.decode.update(event)
        return request

    async def nothing_is_left(self):
        await until(lambda: self.dispatcher.num_prefill_calls == 0)
        assert self.fleet.num_mailboxes == 0
        assert self.door.running.num_requests == 0
        assert self.prefill is None or self.prefill.num_open_calls == 0


@pytest.fixture
def router_config():
    return RouterConfig(max_active_requests=1, on_failure=OnFailure.FAIL, max_wait_s=0.05)


@pytest.fixture
async def empty_world(fleet, clock, router_config, monkeypatch, tmp_path):
    async def at_once(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    counters = KvCounters()
    config = FrontDoorConfig("tiny", Mode.DISAGGREGATED, router_config)
    running = RunningRequests(router_config.max_active_requests, clock)
    recorder = Recorder(tmp_path / "record")
    history = History(10, clock)
    door = FrontDoor(Probe(), counters, running, history, Traces(clock), recorder=recorder)
    async with Dispatcher(fleet, config.dispatch, counters, clock) as dispatcher:
        generation = Generation(
            fleet, dispatcher, make_tokenizer(), door, config=config, clock=clock
        )
        bodies = BodyReader(max_body_bytes=1000, max_held_bytes=1500, timeout_s=0.05)
        gauges = Gauges(fleet, dispatcher, door, clock, config.mode)
        app = HttpApp(
            generation,
            door.readiness,
            "tiny",
            Defaults(),
            clock,
            lambda: door.measured.telemetry.exposition(gauges.samples()),
            bodies,
        ).asgi()
        with recorder:
            yield World(generation, fleet, dispatcher, door, app)


@pytest.fixture
async def world(empty_world, join):
    empty_world.prefill = await join("prefill-0", Role.PREFILL)
    empty_world.decode = await join("decode-0")
    return empty_world


def ids_of(text):
    return [token_id for token_id in make_tokenizer().encode(text)]


async def test_an_answer_comes_whole_with_usage_phases_and_timing(world):
    exchange = world.post(CHAT, {"messages": USER, "max_tokens": 3, "return_token_ids": True})
    request = await world.all_tokens(*ids_of("abc"))
    await exchange.end()

    [choice] = exchange.json["choices"]
    assert exchange.status == 200
    assert exchange.json["id"] == f"chatcmpl-{request.request_id}"
    assert exchange.json["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", ids_of("abc"))
    assert exchange.json["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert exchange.json["twophase"]["phases"]["prefill_s"] == 1.5
    assert exchange.json["twophase"]["transfer"]["num_bytes"] == 512
    assert exchange.headers["x-request-id"] == request.request_id
    assert exchange.headers["content-length"] == str(len(exchange.data))
    assert "prefill;dur=1500.000, " in exchange.headers["server-timing"]
    await world.nothing_is_left()


async def test_who_left_is_recorded_whether_it_ended_well_or_not(world, tmp_path):
    exchange = world.post(CHAT, {"messages": USER, "max_tokens": 3})
    await world.all_tokens(*ids_of("abc"))
    await exchange.end()
    gone = world.post(CHAT, {"messages": USER, "max_tokens": 3})
    await world.first_token(ids_of("a")[0])
    gone.leave()
    await gone.end()
    await world.nothing_is_left()
    lines = (tmp_path / "record").read_text(encoding="utf-8").splitlines()
    ended, left = map(json.loads, lines)
    assert (ended["num_prompt_tokens"], ended["num_output_tokens"]) == (6, 3)
    assert left["num_prompt_tokens"] == 6
    assert left["num_output_tokens"] < 3


async def test_a_stream_has_one_event_per_token_and_tells_its_end(world):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "max_tokens": 4, "stream": True, "stream_options": options}
    exchange = world.post(CHAT, body)
    # A character of two tokens: the first has no text yet, but an event.
    await world.all_tokens(*ids_of("aéb"))
    await exchange.end()

    opening, *tokens, closing, usage = exchange.events
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["delta"] for e in tokens] == [
        {"content": c} for c in ("a", "", "é", "b")
    ]
    assert [e["usage"]["completion_tokens"] for e in tokens] == [1, 2, 3, 4]
    assert [e["choices"][0]["finish_reason"] for e in tokens] == [None] * 4
    assert closing["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert closing["usage"]["completion_tokens"] == 4
    assert closing["twophase"]["phases"]["decode_s"] == 2.0
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 10)
    assert exchange.data.endswith(b"\n\ndata: [DONE]\n\n")
    assert {e["object"] for e in exchange.events} == {"chat.completion.chunk"}
    assert len({e["id"] for e in exchange.events}) == 1


async def test_the_text_of_a_stream_is_that_of_the_whole_answer(world):
    token_ids = [*ids_of("né"), ids_of("é")[0]]  # ends inside a character
    answers = []
    for stream in (False, True):
        body = {"prompt": [5], "max_tokens": 4, "stream": stream}
        exchange = world.post(TEXT, body)
        await world.all_tokens(*token_ids)
        await exchange.end()
        world.decode.commands.clear()
        world.prefill.calls.clear()
        frames = exchange.events if stream else [exchange.json]
        assert {frame["object"] for frame in frames} == {"text_completion"}
        assert all("usage" not in frame for frame in frames if stream)
        answers.append("".join(frame["choices"][0]["text"] for frame in frames))

    assert answers == ["né\ufffd", "né\ufffd"]


async def test_nothing_is_sent_before_the_first_token_and_the_first_token_is_sent_at_once(world):
    body = {"prompt": "hi", "max_tokens": 2, "stream": True}
    exchange = world.post(TEXT, body | {"stream_options": {"continuous_usage_stats": True}})
    await world.reserved()
    assert exchange.sent == []

    request = await world.first_token(ids_of("x")[0])
    await until(lambda: len(exchange.sent) == 2)
    assert [e["choices"][0]["text"] for e in exchange.events] == ["x"]

    world.decode.update(token(1, request_id=request.request_id, done=DONE))
    await exchange.end()
    assert [e["usage"]["completion_tokens"] for e in exchange.events] == [1, 2, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request(world, stream):
    exchange = world.post(TEXT, {"prompt": "hi", "max_tokens": 9, "stream": stream})
    request = await world.first_token()
    await until(lambda: not stream or exchange.sent)
    exchange.leave()
    await exchange.end()

    assert CancelRequest(request.request_id) in world.decode.commands
    assert not any(message.get("more_body") is False for message in exchange.sent)
    await world.nothing_is_left()


async def test_a_client_that_leaves_before_its_first_token_frees_its_request(world):
    exchange = world.post(CHAT, {"messages": USER})
    request = await world.reserved()
    exchange.leave()
    await exchange.end()

    assert CancelRequest(request.request_id) in world.decode.commands
    assert exchange.sent == []
    await world.nothing_is_left()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("no blocks", retry_after_s=2.2), 429, "rate_limit_exceeded"),
        (Cancelled("by an operator"), 499, "cancelled"),
        (PeerLost("decode-0", "killed"), 503, "unavailable"),
        (TransferFailed(TransferFailure.CHECKSUM, "piece 3"), 503, "unavailable"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (ConfigError("a", "b"), 500, None),
    ],
)
async def test_a_failure_before_the_first_token_is_a_status(world, error, status, code):
    exchange = world.post(TEXT, {"prompt": "hi", "stream": True})
    request = await world.reserved()
    world.decode.update(RequestFailed(request.request_id, error))
    await exchange.end()

    assert (exchange.status, exchange.error["code"]) == (status, code)
    assert (exchange.error["message"], exchange.error["param"]) == (str(error), None)
    assert exchange.headers.get("retry-after") == ("3" if status == 429 else None)
    await world.nothing_is_left()


async def test_a_failure_in_mid_stream_is_an_event_and_no_clean_end(world):
    exchange = world.post(TEXT, {"prompt": "hi", "max_tokens": 9, "stream": True})
    await world.first_token()
    await until(lambda: exchange.sent)
    world.decode.die()
    await exchange.end()

    assert exchange.status == 200
    assert exchange.events[-1]["error"]["code"] == "unavailable"
    assert b"[DONE]" not in exchange.data
    assert exchange.sent[-1]["more_body"] is False


async def test_the_end_of_the_drain_is_told(world):
    exchange = world.post(TEXT, {"prompt": "hi", "max_tokens": 9, "stream": True})
    await world.first_token()
    await until(lambda: exchange.sent)
    exchange.task.cancel()
    await exchange.end()

    assert exchange.events[-1]["error"]["message"] == "router was lost: it is shutting down"
    await world.nothing_is_left()


async def test_a_bug_is_an_error_without_its_details(world, monkeypatch):
    def explode(*arguments):
        raise RuntimeError("secret")

    monkeypatch.setattr(world.door.counters, "finished", explode)
    exchange = world.post(TEXT, {"prompt": "hi", "max_tokens": 2})
    await world.all_tokens(100, 101)
    with pytest.raises(ExceptionGroup):  # the server logs it
        await exchange.end()

    assert (exchange.status, exchange.error["type"]) == (500, "server_error")
    assert b"secret" not in exchange.data
    await world.nothing_is_left()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "hi", "temperature": 9}, "temperature"),
        (TEXT, {"prompt": "hi", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "hi", "max_tokens": 10**30}, "max_tokens"),
        (TEXT, {"prompt": "hi", "seed": -1}, "seed"),
        (TEXT, {"prompt": "hi", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "hi", "stop_token_ids": [512]}, "stop_token_ids[0]"),
        (TEXT, {"prompt": [1, 512]}, "prompt[1]"),
        (TEXT, {"prompt": [-1]}, "prompt[0]"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "x" * 64}, "prompt"),
        (TEXT, {"prompt": "hi", "stream": True, "n": 2}, "n"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": USER, "max_completion_tokens": 99}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "tools": [{}]}, "tools"),
        (CHAT, {"messages": USER, "mesages": []}, "mesages"),
        (CHAT, b"{", None),
        (CHAT, b"[]", None),
    ],
)
async def test_a_bad_request_names_the_field_as_the_client_wrote_it(world, path, body, param):
    exchange = await world.post(path, body).end()

    assert (exchange.status, exchange.error["param"]) == (400, param)
    assert exchange.error["type"] == "invalid_request_error"
    assert set(exchange.error) == {"message", "type", "param", "code"}
    assert param is None or param.partition("[")[0] in exchange.error["message"]
    assert not any(isinstance(command, Reserve) for command in world.decode.commands)
    await world.nothing_is_left()


async def test_a_model_that_is_not_served_is_not_found(world):
    asked = await world.post(TEXT, {"prompt": "hi", "model": "gpt"}).end()
    named = await world.get("/v1/models/org/gpt").end()

    for exchange, model in ((asked, "gpt"), (named, "org/gpt")):
        assert (exchange.status, exchange.error["code"]) == (404, "model_not_found")
        assert f"'{model}' does not exist" in exchange.error["message"]


async def test_the_served_model_is_listed_with_its_limit(world):
    listed = await world.get("/v1/models").end()
    named = await world.get("/v1/models/tiny").end()

    [model] = listed.json["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 64)
    assert named.json == model


async def test_one_request_too_many_is_told_when_to_come_again(world):
    first = world.post(TEXT, {"prompt": "hi", "max_tokens": 2})
    await world.reserved()
    second = await world.post(TEXT, {"prompt": "hi"}).end()
    await world.all_tokens(100, 101)
    await first.end()

    assert (second.status, second.headers["retry-after"]) == (429, "1")
    assert first.status == 200


@pytest.mark.parametrize(
    ("path", "prompt_size", "max_tokens"), [(TEXT, 6, 16), (CHAT, 6, 58), (TEXT, 60, 4)]
)
async def test_an_unset_token_limit_is_the_endpoints_own_or_what_is_left(
    world, path, prompt_size, max_tokens
):
    prompt = "x" * prompt_size
    body = {TEXT: {"prompt": prompt}, CHAT: {"messages": [{"role": "user", "content": prompt}]}}
    exchange = world.post(path, body[path])
    request = await world.reserved()
    exchange.leave()
    await exchange.end()

    assert request.sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("asked_s", "granted_s"), [(None, 600), (7, 7), (10**6, 600)])
async def test_a_deadline_is_the_routers_unless_a_shorter_one_is_asked_for(
    world, clock, asked_s, granted_s
):
    async def discard(delivery):
        pass

    received_s = clock.now_s()
    asked = Sampling(max_tokens=2)
    incoming = Incoming("r", "", "hi", asked, received_s, time_limit_s=asked_s)
    running = asyncio.create_task(world.generation.run(incoming, discard))
    request = await world.reserved()
    running.cancel()

    assert request.deadline_s == received_s + granted_s


async def test_without_workers_requests_are_refused_and_only_health_is_well(empty_world):
    asked = await empty_world.post(TEXT, {"prompt": "hi"}).end()
    models = await empty_world.get("/v1/models").end()
    health = await empty_world.get("/health").end()

    assert [asked.status, models.status, health.status] == [503, 503, 200]
    assert "no decode worker is connected" in asked.error["message"]


@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 503)])
async def test_ready_tells_what_the_probe_found(world, monkeypatch, is_ready, status):
    monkeypatch.setattr(world.door.readiness, "is_ready", is_ready, raising=False)

    assert (await world.get("/ready").end()).status == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", TEXT, 405), ("POST", "/v1/models", 405)],
)
async def test_other_routes_are_refused_in_the_same_form(world, method, path, status):
    exchange = await Exchange(world.app, path, method=method).end()

    assert exchange.status == status
    assert exchange.error["type"] == "invalid_request_error"


class TestBodies:
    @pytest.mark.parametrize(
        "headers",
        [
            (),
            ((b"content-type", b"text/plain"),),
            ((b"content-type", b"application/x-www-form-urlencoded"),),
            (*JSON, (b"content-encoding", b"gzip")),
        ],
    )
    async def test_what_a_foreign_page_could_send_is_refused(self, world, headers):
        exchange = await world.post(TEXT, {"prompt": "hi"}, headers=headers).end()

        assert exchange.status == 415

    async def test_a_charset_may_stand_beside_the_type(self, world):
        headers = ((b"content-type", b"Application/JSON; charset=utf-8"),)
        exchange = await world.post(TEXT, {"prompt": ""}, headers=headers).end()

        assert exchange.error["param"] == "prompt"

    @pytest.mark.parametrize("declared", [(), ((b"content-length", b"1001"),)])
    async def test_a_large_body_is_refused_declared_or_not(self, world, declared):
        exchange = await world.post(TEXT, b"x" * 1001, headers=(*JSON, *declared)).end()

        assert exchange.status == 413
        assert "1001 bytes" in exchange.error["message"]

    async def test_a_body_that_does_not_come_is_given_up(self, world):
        exchange = world.post(TEXT, None, messages=[part(b"{", is_last=False)])
        await exchange.end()

        assert exchange.status == 408

    async def test_a_client_that_leaves_while_it_sends_is_forgotten(self, world):
        exchange = world.post(TEXT, None, messages=[part(b"{", is_last=False), GONE])
        await exchange.end()
        await world.nothing_is_left()

    async def test_bodies_in_hand_are_bounded_together_and_counted_back(self, world):
        bodies = BodyReader(max_body_bytes=1000, max_held_bytes=1500, timeout_s=1)

        def request(size):
            queue = asyncio.Queue()
            queue.put_nowait(part(b"x" * size, is_last=True))
            return Request({"type": "http", "headers": list(JSON)}, queue.get)

        async with bodies.body(request(900)) as data:
            assert (len(data), bodies.num_held_bytes) == (900, 900)
            with pytest.raises(Overloaded):
                async with bodies.body(request(700)):
                    raise AssertionError
            async with bodies.body(request(600)):
                assert bodies.num_held_bytes == 1500
        assert bodies.num_held_bytes == 0
