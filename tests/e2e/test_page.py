"""The live page in a real browser, over a real cluster under load.

Skipped where no Chromium is installed. `--screenshots DIR` leaves pictures of it.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect, sync_playwright

from deploy.local_cluster import LocalCluster
from tests.e2e.conftest import StartCluster
from tests.e2e.page_load import (
    HOSTILE_ID,
    STILL_ID,
    ask,
    stand_still,
    streams,
    wait_for_ended,
)
from tests.tiny_model import write_tiny_model
from twophase.client import Client

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

SETUP = (
    *("decode.max_num_sequences=4", "engine.max_context_tokens=1024"),
    *("prefill.kv_cache=4MiB", "decode.kv_cache=4MiB"),
)
DECISION = (
    "held back by decode: prefill stays at 1 (steady): nobody waits; decode 1 -> 2 (late): "
    "requests wait 0.84 s for a slot, and target_wait_s is 0.50"
)
AUDIT = Path(__file__).with_name("page_audit.js").read_text(encoding="utf-8")
DESK: ViewportSize = {"width": 1280, "height": 820}
SIZES: dict[str, ViewportSize] = {"desk": DESK, "phone": {"width": 360, "height": 740}}
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
PICTURES = (
    *("page-desk-light.png", "page-desk-dark.png", "page-request-desk-dark.png"),
    *("page-phone-light.png", "page-request-phone-light.png"),
)
KEY = "tp-the-right-one"
LATE_MS = 15_000
# Where the worker stood when it was stopped, in a step or between two, is chance.
GAP = re.compile(
    r"Token \d+ came ([67]\d\d ms|\d\.\d\d s) after the one before: "
    r"(one decode step of \d sequences? took|the worker's steps took) .*"
)


@pytest.fixture(scope="module")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    directory = request.config.getoption("--screenshots")
    return Path(directory) if directory else None


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, start_cluster: StartCluster, pictures: Path | None
) -> Iterator[LocalCluster]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    cluster = start_cluster(model, *SETUP)
    with streams(cluster.address, 7 if pictures else 3, 0.0 if pictures else 0.3):
        wait_for_ended(cluster.address, 100 if pictures else 10, 150)
        stand_still(cluster)
        yield cluster


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> str:
    with Client(cluster.address) as client:
        return f"http://{client.status().http_address}"


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    # After the cluster, whose start needs an event loop: Playwright's is in this thread.
    expect.set_options(timeout=LATE_MS)
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses it to root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, **context: Any) -> Iterator[Page]:
    """The page; at the end its console is empty, and nobody but the router was asked."""
    with browser.new_context(**{"viewport": DESK, **context}) as made:
        page = made.new_page()
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/ui")
        yield page
        page.unroute_all(behavior="wait")
        assert [text for text in said if "net::ERR_FAILED" not in text] == []
        assert {address.startswith(f"{url}/ui") for address in asked} == {True}


def state_of(page: Page) -> dict[str, Any]:
    answer = page.request.get(page.url + "/state")
    assert answer.ok
    return dict(answer.json())


def list_first(page: Page, request_id: str) -> None:
    """Keep a request that ended at the top of its list, however many follow it."""

    def rename(route: Route) -> None:
        state = route.fetch().json()
        first, *others = state["ended"]
        others = [one for one in others if one["request_id"] != request_id]
        state["ended"] = [first | {"request_id": request_id}, *others]
        route.fulfill(json=state)

    page.route("**/ui/state", rename)
    expect(page.get_by_role("button", name=request_id, exact=True)).to_be_visible()


def take(page: Page, pictures: Path | None, name: str) -> None:
    """A picture of what stands at the top, if it is wanted."""
    if pictures is not None and name in PICTURES:
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(1500)  # all of it is painted
        page.screenshot(path=pictures / name)


def reach(page: Page, selector: str) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} is not reached by Tab")


def test_it_shows_workers_links_rates_and_requests_as_they_run(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator("#pools .who")).to_have_text(["prefill-0ready", "decode-0ready"])
        expect(page.locator("#pools .kvbar").last).to_have_attribute(
            "aria-label", re.compile("used, .* cached of 256 KV blocks")
        )
        expect(page.locator("#links tbody tr")).to_contain_text("prefill-0 → decode-0shm")
        expect(page.locator("#rates h2")).to_have_text(
            ["Prompt tokens", "Output tokens", "Time to first token", "Between two tokens"]
        )
        expect(page.locator("#running tbody tr .bar").first).to_be_visible()
        first = page.locator("#running tbody tr button").first.inner_text()
        ended = page.locator("#ended").get_by_role("button", name=first, exact=True)
        expect(ended).to_be_visible(timeout=4 * LATE_MS)
        expect(page.locator("#judged")).to_contain_text("requests that ended within the last 5")
        assert page.title().endswith("twophase")
        state = state_of(page)
        assert state["rates"]["output_tokens_per_s"] > 0
        assert state["num_running"] == len(state["running"])


def test_the_keyboard_alone_opens_a_request_whose_gap_is_named_and_closes_it(
    browser: Browser, url: str
) -> None:
    with opened(browser, url) as page:
        list_first(page, STILL_ID)
        reach(page, f'#ended button[title="{STILL_ID}"]')
        row = page.locator("#ended tr", has_text=STILL_ID)
        told = row.inner_text()  # with its age
        expect(row).not_to_have_text(told, use_inner_text=True)
        assert page.evaluate("document.activeElement.title") == STILL_ID
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name=STILL_ID)
        expect(dialog.locator(".waterfall tbody tr").first).to_be_visible()
        assert page.evaluate("document.activeElement.closest('dialog') !== null")
        for phase in ("prefill", "push", "transfer", "decode", "gap"):
            expect(dialog.get_by_role("rowheader", name=phase, exact=True).first).to_be_visible()
        expect(dialog.locator(".what", has_text=GAP)).to_have_count(1)
        expect(dialog.locator(".found").first).to_contain_text("took")
        page.keyboard.press("Escape")
        expect(page.locator("dialog[open]")).to_have_count(0)
        assert page.evaluate("document.activeElement.title") == STILL_ID
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.closest('tr').previousElementSibling !== null")


def test_a_row_that_moves_keeps_the_focus(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        is_turned = False
        frozen = state_of(page)

        def turn(route: Route) -> None:
            ended = frozen["ended"][::-1] if is_turned else frozen["ended"]
            route.fulfill(json=frozen | {"ended": ended})

        page.route("**/ui/state", turn)
        rows = page.locator("#ended tbody button")
        first, last = (frozen["ended"][i]["request_id"] for i in (0, -1))
        expect(rows.first).to_have_text(first)
        expect(rows.last).to_have_text(last)
        rows.last.focus()
        is_turned = True
        expect(rows.first).to_have_text(last)
        assert page.evaluate("document.activeElement.title") == last


def test_what_a_request_is_called_is_text_whatever_it_is(
    browser: Browser, url: str, cluster: LocalCluster
) -> None:
    ask(cluster.address, HOSTILE_ID)
    with opened(browser, url) as page:
        list_first(page, HOSTILE_ID)
        page.get_by_role("button", name=HOSTILE_ID, exact=True).click()
        expect(page.locator("#detail-title")).to_have_text(HOSTILE_ID)
        expect(page.locator(".waterfall tbody tr").first).to_be_visible()
        expect(page.locator("img")).to_have_count(0)


def test_it_is_legible_in_light_and_dark_on_desk_and_phone(
    browser: Browser, url: str, cluster: LocalCluster, pictures: Path | None
) -> None:
    with Client(cluster.address) as client:
        client.admin.note_scaling(DECISION)
    with opened(browser, url, reduced_motion="reduce") as page:
        expect(page.locator("#scaling")).to_contain_text(DECISION)
        expect(page.locator("#troubles li:has(.c-decode) button")).to_be_visible()
        for scheme, (name, size) in product(SCHEMES, SIZES.items()):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size(size)
            assert page.evaluate(AUDIT) == []
            take(page, pictures, f"page-{name}-{scheme}.png")
            page.locator("#troubles li:has(.c-decode) button").click()
            expect(page.locator(".waterfall tbody tr").first).to_be_visible()
            assert page.evaluate(AUDIT) == []
            take(page, pictures, f"page-request-{name}-{scheme}.png")
            page.keyboard.press("Escape")


def test_nothing_to_show_and_a_lost_router_are_told_in_words(browser: Browser, url: str) -> None:
    def empty(route: Route) -> None:
        state = route.fetch().json()
        state |= {"is_ready": False, "workers": [], "links": [], "running": [], "ended": []}
        state["judged"] |= {"num_requests": 0, "troubles": [], "waits": []}
        state["scaling"] = {"is_configured": False, "decisions": []}
        state["stuck"] = [{"name": "decode-0", "address": "a:1", "why": "it is silent", "age_s": 9}]
        route.fulfill(json=state)

    with opened(browser, url) as page:
        page.route("**/ui/state", empty)
        for text in (
            *("Nothing is running.", "No request has ended yet.", "No link is open"),
            *("prefill pool: no worker is connected", "decode pool: no worker is connected"),
            *("Scaling is not configured", "Not ready: no token", "decode-0 was given up 9 s ago"),
        ):
            expect(page.get_by_text(text)).to_be_visible()
        assert page.evaluate(AUDIT) == []
        page.unroute_all(behavior="wait")
        page.route("**/ui/state", lambda route: route.abort())
        expect(page.locator("#lost")).to_contain_text("has not answered since")
        expect(page.locator("#live")).to_have_text("not connected")
        expect(page.locator("#main")).to_have_class("stale")
        page.unroute_all(behavior="wait")
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator("#lost")).to_be_hidden()
        expect(page.locator("#pools .who")).to_have_count(2)


def test_a_key_is_asked_for_kept_for_the_tab_and_sent_as_a_header_alone(
    browser: Browser, url: str
) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.fallback()
        else:
            error = {"error": {"message": "the admin key is missing or wrong"}}
            route.fulfill(status=403, body=json.dumps(error))

    with browser.new_context(viewport=DESK) as context:
        page = context.new_page()
        page.route("**/ui/state", guard)
        page.goto(f"{url}/ui")
        dialog = page.get_by_role("dialog", name="admin key")
        expect(dialog).to_be_visible()
        assert page.evaluate(AUDIT) == []
        page.keyboard.type("tp-a-wrong-one")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("missing or wrong")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Enter a key").click()
        page.get_by_label("Admin key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#pools .who")).to_have_count(2)
        expect(page.locator("#lost")).to_be_hidden()
        assert page.url == f"{url}/ui"
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert page.evaluate("localStorage.length") == 0
