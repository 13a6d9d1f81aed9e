"""The page's routes over the real fleet: one snapshot for all who look, and none for nobody."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from core.config import Mode
from core.errors import InvalidRequest
from core.settings.router import RouterConfig
from core.worker import Role
from router.answer import Answer
from router.config import FrontDoorConfig
from router.dispatch import Dispatcher
from router.generation import FrontDoor
from router.page import routes
from router.page.routes import FILE_PATHS, JUDGED_S, SHARED_S, Page
from router.running import RunningRequests
from router.telemetry.history import History
from router.telemetry.totals import KvCounters
from router.timeline.record import Record
from router.tracing.traces import Traces
from tests.unit.core.test_diagnosis import HEALTHY, delayed
from tests.unit.router.doubles import make_request, until

RECORD = Record(0.0, 0.0)
STATIC = routes.files("router.page") / "static"


@pytest.fixture
async def dispatcher(fleet, clock):
    config = FrontDoorConfig("tiny", Mode.DISAGGREGATED, RouterConfig())
    async with Dispatcher(fleet, config.dispatch, KvCounters(), clock) as dispatcher:
        yield dispatcher


@pytest.fixture
def door(clock):
    ready = SimpleNamespace(is_ready=True)
    running, history = RunningRequests(8, clock), History(100, clock)
    return FrontDoor(ready, KvCounters(), running, history, Traces(clock))


@pytest.fixture
def make_page(fleet, dispatcher, door, clock):
    def make(**router):
        config = FrontDoorConfig("tiny", Mode.DISAGGREGATED, RouterConfig(**router), is_scaled=True)
        return Page(fleet, dispatcher, door, config=config, clock=clock)

    return make


async def json_of(call, **path_params):
    response = await call(SimpleNamespace(path_params=path_params))
    assert response.headers["cache-control"] == "no-store"
    return routes.json.loads(response.body)


async def test_the_state_tells_workers_requests_and_decisions(make_page, join, door, clock):
    await join("prefill-0", Role.PREFILL)
    decode = await join("decode-0")
    await until(lambda: decode.info is not None)
    door.history.add(replace(HEALTHY, request_id="ended"), RECORD)
    door.decisions.add("decode 1 -> 2 (late): requests wait", clock.now_s())
    page = make_page()
    clock.advance(3.0)
    with door.running.entered("inside", clock.now_s() - 2.0) as running:
        running.answers.append(Answer(make_request("inside"), running.received_s, 0.5))
        state = await json_of(page.state)
    assert [worker["name"] for worker in state["workers"]] == ["prefill-0", "decode-0"]
    assert state["running"][0]["spans"] == [["tokenize", 0.5], ["place", 1.5]]
    assert [past["request_id"] for past in state["ended"]] == ["ended"]
    assert state["scaling"] == {
        "is_configured": True,
        "decisions": [[3.0, "decode 1 -> 2 (late): requests wait"]],
    }


async def test_all_who_look_share_a_snapshot_and_nobody_costs_nothing(
    make_page, clock, monkeypatch
):
    made = []
    monkeypatch.setattr(routes, "snapshot_of", lambda facts: made.append(facts) or facts.judged)
    page = make_page()
    assert made == []
    for _ in range(50):
        await json_of(page.state)
    assert len(made) == 1
    clock.advance(1.01 * SHARED_S)
    await json_of(page.state)
    assert len(made) == 2


async def test_what_is_slow_is_judged_anew_every_few_seconds(make_page, door, clock):
    page = make_page()
    assert (await json_of(page.state))["judged"]["num_requests"] == 0
    door.history.add(HEALTHY, RECORD)
    clock.advance(1.01 * SHARED_S)
    assert (await json_of(page.state))["judged"]["num_requests"] == 0
    clock.advance(JUDGED_S)
    assert (await json_of(page.state))["judged"]["num_requests"] == 1


async def test_a_request_is_told_while_it_runs_and_after(make_page, door, clock):
    page = make_page()
    door.history.add(replace(delayed("queue"), request_id="slow"), RECORD)
    slow = await json_of(page.request, request_id="slow")
    assert [finding["phase"] for finding in slow["findings"]] == ["queue"]
    with door.running.entered("inside", clock.now_s()) as running:
        running.answers.append(Answer(make_request("inside"), running.received_s, 0.5))
        clock.advance(2.0)
        assert (await json_of(page.request, request_id="inside"))["state"] == "place"
    with pytest.raises(InvalidRequest, match="no request with this id is running, or ended"):
        await page.request(SimpleNamespace(path_params={"request_id": "inside"}))


async def test_the_files_are_served_with_a_strict_policy_and_hold_nothing_of_others(make_page):
    with TestClient(Starlette(routes=make_page().routes())) as client:
        assert client.get("/").text == client.get("/ui").text
        for path in FILE_PATHS:
            response = client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert client.post(path).status_code == 405
            links = re.findall(r"(?:src|href)=[\"']([^\"']+)", response.text)
            assert {link for link in links if f"/{link}" not in FILE_PATHS} == set()


async def test_a_router_whose_page_is_off_has_no_such_routes(make_page):
    assert make_page(page=False).routes() == []


def test_the_files_are_small_and_no_text_becomes_markup():
    names = [path.name for path in STATIC.iterdir()]
    texts = {name: (STATIC / name).read_text(encoding="utf-8") for name in names}
    assert sum(len(text.encode()) for text in texts.values()) < 42_000
    for name in ("page.js", "draw.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", texts[name]
        )
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", texts["page.html"])
    assert not any("http://" in text and "w3.org" not in text for text in texts.values())
