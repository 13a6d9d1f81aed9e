"""The routes of the page: its files, what it polls, and one request in full.

    /ui                     the page              /ui/state           a Snapshot, for all who look
    /ui/page.js, ...        its parts             /ui/requests/ID     a Waterfall
    /                       leads to the page

A snapshot is made when somebody asks and the last one is older than SHARED_S: any number of viewers
costs one a second, and nobody costs nothing. What `diagnose` says is made anew every JUDGED_S.
Whoever may not see it was refused before (`router.http.keys`).

Runs in the router's event loop.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from core.clock import Clock
from core.errors import InvalidRequest
from core.request import RequestId
from core.worker import Role
from router.config import FrontDoorConfig
from router.dispatch import Dispatcher
from router.generation import FrontDoor
from router.listing import listed_request, listed_worker
from router.members.fleet import Fleet
from router.page.snapshot import MAX_REQUESTS, Facts, Judged, snapshot_of
from router.page.waterfall import Waterfall, waterfall_of, waterfall_so_far
from router.telemetry.recent import SLOT_S

SHARED_S = 0.9
JUDGED_S = 5.0
WINDOW_S = 300.0
MAX_JUDGED = 300
LATELY_SLOTS = 5

# Path, file, media type. What they hold is the same for everybody.
_FILES = (
    ("/ui", "page.html", "text/html; charset=utf-8"),
    ("/ui/page.css", "page.css", "text/css; charset=utf-8"),
    ("/ui/page.js", "page.js", "text/javascript; charset=utf-8"),
    ("/ui/draw.js", "draw.js", "text/javascript; charset=utf-8"),
    ("/ui/icon.svg", "icon.svg", "image/svg+xml"),
)
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


FILE_PATHS = frozenset(path for path, _, _ in _FILES)


class Page:
    """The page of one router; one per process."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        door: FrontDoor,
        *,
        config: FrontDoorConfig,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._door = door
        self._config = config
        self._clock = clock
        self._shared = b""
        self._shared_s: float | None = None
        self._judged = Judged.of((), WINDOW_S)
        self._judged_s: float | None = None

    def routes(self) -> list[Route]:
        """All of them; none where the page is switched off."""
        if not self._config.router.page:
            return []
        parts = files("router.page") / "static"
        served = [
            Route(path, _file((parts / name).read_bytes(), media_type))
            for path, name, media_type in _FILES
        ]
        state = Route("/ui/state", self.state)
        return [
            Route("/", _to_page),
            *served,
            state,
            Route("/ui/requests/{request_id:path}", self.request),
        ]

    async def state(self, request: Request) -> Response:
        """GET /ui/state: the page at this moment, or less than a second ago."""
        now_s = self._clock.now_s()
        if self._shared_s is None or now_s - self._shared_s >= SHARED_S:
            self._shared = _json(asdict(snapshot_of(self._facts(now_s))))
            self._shared_s = now_s
        return _response(self._shared, "application/json")

    async def request(self, request: Request) -> Response:
        """GET /ui/requests/ID: one request that is inside, or that ended lately."""
        waterfall = self._waterfall(RequestId(request.path_params["request_id"]))
        return _response(_json(asdict(waterfall)), "application/json")

    def _waterfall(self, request_id: RequestId) -> Waterfall:
        running = self._door.running.find(request_id)
        if running is not None and running.answer is not None:
            known, record = running.answer.known(self._clock.now_s()), running.answer.record
            return waterfall_so_far(known, record.events(None), running.state)
        ended = self._door.history.find(request_id)
        if ended is None:
            what = "no request with this id is running, or ended lately"
            raise InvalidRequest("request_id", request_id, what)
        events = ended.record.events(ended.completion.phases.total_s)
        return waterfall_of(ended.completion, events, self._door.history.explain(ended))

    def _facts(self, now_s: float) -> Facts:
        door, fleet, recent = self._door, self._fleet, self._door.measured.recent
        members = [member for role in Role for member in fleet.members(role)]
        running = door.running.oldest_first()
        return Facts(
            now_s=now_s,
            model=self._config.model,
            mode=self._config.mode,
            is_ready=door.readiness.is_ready,
            is_scaled=self._config.is_scaled,
            workers=[(listed_worker(member, now_s), member.status) for member in members],
            stuck=fleet.stuck,
            demand=self._dispatcher.demand,
            kv=door.counters.totals,
            num_running=len(running),
            running=[
                (listed_request(one, now_s), one.known(now_s)) for one in running[:MAX_REQUESTS]
            ],
            ended=door.history.latest(MAX_REQUESTS),
            judged=self._judge(now_s),
            slots=recent.slots(now_s),
            lately=recent.lately(LATELY_SLOTS, now_s),
            lately_s=LATELY_SLOTS * SLOT_S,
            decisions=door.decisions.latest(),
        )

    def _judge(self, now_s: float) -> Judged:
        if self._judged_s is None or now_s - self._judged_s >= JUDGED_S:
            self._judged = Judged.of(self._door.history.since(WINDOW_S)[-MAX_JUDGED:], WINDOW_S)
            self._judged_s = now_s
        return self._judged


async def _to_page(request: Request) -> Response:
    """GET /: where somebody looks who knows the address alone."""
    return RedirectResponse("/ui")


def _file(data: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return _response(data, media_type)

    return serve


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _response(data: bytes, media_type: str) -> Response:
    return Response(data, headers=_HEADERS | {"content-type": media_type})
