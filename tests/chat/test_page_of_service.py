"""The web page of the service in a real browser: against a scripted service, and against the real one."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from following import following_pair

from stepspec.serve import create_app
from stepspec.serve.page import add_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
METRICS = """\
# TYPE stepspec_requests_running gauge
stepspec_requests_running{model_name="a {b} c"} 2.0
stepspec_requests_running{model_name="b"} 1.0
stepspec_steps_judged_total{policy="two-level"} 8.0
stepspec_steps_accepted_total{policy="two-level"} 6.0
stepspec_steps_accepted_created{policy="two-level"} 1.79e+09
stepspec_committed_tokens_total 1e3
"""


def step(index: int, origin: str, text: str, **scores: float | None) -> dict[str, Any]:
    about = {"index": index, "origin": origin, "num_tokens": 10, "num_from_draft": 10, "end": "delimiter"}
    return chunk({"reasoning": text}, step={**about, "scores": scores})


def chunk(delta: dict[str, Any] | None = None, reason: str | None = None, **extension: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": reason}], "stepspec": extension}


def proposed(index: int, text: str) -> dict[str, Any]:
    return chunk(event={"type": "step.proposed", "index": index, "text": text, "num_tokens": 9})


def judged(index: int, accepted: bool, **scores: float) -> dict[str, Any]:
    return chunk(event={"type": "step.judged", "index": index, "accepted": accepted, "scores": scores})


def last(seconds: float, note: str | None = None, reason: str = "stop") -> list[dict[str, Any]]:
    metrics = {
        "generation_time_ms": 1000 * seconds,
        "tokens_per_second": 30 / seconds,
        "stepspec": {"counts": {"steps_judged": 3, "steps_accepted": 1}, "note": note},
    }
    return [chunk(reason=reason), {"choices": [], "usage": {"completion_tokens": 30}, "metrics": metrics}]


ANSWERED = [
    chunk({"role": "assistant", "content": ""}),
    proposed(0, "Twelve."),
    judged(0, True, likelihood=-1.5),
    step(0, "draft", "Twelve.\n\n", likelihood=-1.5),
    proposed(1, "A wrong step."),
    judged(1, False, likelihood=-9.25),
    step(1, "salvaged", "A right step.\n\n", likelihood=None),
    step(2, "target", "All is said.\n\n"),
    chunk({"content": "\n\nIt is "}),
    chunk({"content": "12."}),
]
BY_QUESTION: dict[str, list[Any]] = {
    "hostile": [proposed(0, HOSTILE), judged(0, False), step(0, "target", HOSTILE), chunk({"content": HOSTILE})],
    # The thinking of this model is not separate: the answer has the text of its steps.
    "plain": [
        chunk(step={"index": 0, "origin": "draft", "num_tokens": 9, "text": "First.\n\n", "scores": {}}),
        chunk({"content": "First.\n\nThen."}),
    ],
    "slow": [step(0, "draft", "One."), proposed(1, "Two."), "wait"],
    "broken": [step(0, "draft", "One."), "break"],
    "failing": [{"error": {"message": "A model failed."}}],
}


class ScriptedService:
    """Plays the contract of the service. The target alone waits until `release` is set."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.bodies: list[Any] = []
        self.release, self.left = threading.Event(), threading.Event()
        self.app = FastAPI()
        add_page(self.app)
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.get("/metrics")(self.metrics)

    async def metrics(self) -> Response:
        return PlainTextResponse(METRICS)

    async def models(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        cards = [{"id": f"pair@{name}", "policy": name} for name in ("two-level", "target", "token")]
        return JSONResponse({"data": [{"id": "pair", "policy": "two-level"}, *cards]})

    async def chat(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][0]["content"]
        if question == "busy":
            return JSONResponse({"error": {"message": "The queue is full."}}, 503, {"Retry-After": "7"})
        if question == "proxy":
            return Response("<h1>Bad gateway</h1>", 502)
        return StreamingResponse(self._lines(body["model"], question), media_type="text/event-stream")

    def _refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "The API key is missing or unknown."}}, 401)

    async def _lines(self, model: str, question: str) -> AsyncIterator[str]:
        chunks = BY_QUESTION.get(question, ANSWERED)
        yield ": a comment\n\n"
        try:
            if model.endswith("@target"):
                await asyncio.to_thread(self.release.wait, 10)
            for each in chunks:
                if each == "break":
                    return
                if each == "wait":
                    await asyncio.sleep(60)
                yield f"data: {json.dumps(each)}\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise
        note = HOSTILE if question == "hostile" else None
        end = last(1.8 if model.endswith("@target") else 1.0, note, "length" if question == "plain" else "stop")
        yield "".join(f"data: {json.dumps(each)}\r\n\r\n" for each in end) + "data: [DONE]\n\n"


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve an app on loopback and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(browser: Any, address: str, path: str = "", **settings: Any) -> Iterator[Any]:
    """Open the page. At the end, check for errors in the console and for requests to other hosts."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | settings))
    context.set_default_timeout(5000)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on(
        "request", lambda request: None if request.url.startswith((address, "data:")) else problems.append(request.url)
    )
    page.goto(address + path)
    try:
        yield page
    finally:
        context.close()
    # The browser itself reports every status above 399.
    assert [problem for problem in problems if "Failed to load resource" not in problem] == []


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def wait_for_text(page: Any, selector: str, text: str) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text)


def is_in_sight(page: Any, selector: str) -> bool:
    """Whether the whole element is inside the window, without scrolling the page."""
    box, window = page.locator(selector).last.bounding_box(), page.viewport_size
    assert box is not None, selector
    return min(box["x"], box["y"]) >= 0 and (
        box["x"] + box["width"] <= window["width"] and box["y"] + box["height"] <= window["height"]
    )


FIRST_SCREEN = ("#question", "#steps .step", "#legend .target", "#ours .clock", "#target .clock", "#ratio")


def test_the_first_screen_shows_question_current_step_authors_and_speed_without_a_click(browser: Any) -> None:
    service = ScriptedService()
    with listening(service.app) as address, opened(browser, address) as page:
        wait_for_text(page, "#status", "timing the target alone")
        assert page.is_hidden("#ratio")  # the target has not run
        assert page.inner_text("#ours .clock") == "1.00 s"
        service.release.set()
        wait_for_text(page, "#ratio", "1.8× as fast as the target alone, this one question")
        assert page.inner_text("#target .clock") == "1.80 s"
        wait_for_text(page, ".caveat", "One question is not a benchmark. Speculation on steps is not exact")
        assert [each for each in FIRST_SCREEN if not is_in_sight(page, each)] == []
        names = ["Draft", "Both", "Target"]
        assert page.locator("#legend dt").all_inner_texts() == names
        assert page.locator("#legend .count").all_inner_texts() == ["1 step, 33%"] * 3
        assert page.locator("#steps .about b").all_inner_texts() == names
        assert page.locator("#steps > li > .text").all_inner_texts() == ["Twelve.", "A right step.", "All is said."]
        abouts = page.locator("#steps .about").all_inner_texts()
        assert ["likelihood −1.50" in abouts[0], "likelihood –" in abouts[1], "no score" in abouts[2]] == [True] * 3
        colors = "elements => elements.map(each => getComputedStyle(each).borderLeftColor)"
        assert len(set(page.locator("#steps .step").evaluate_all(colors))) == 3
        refused = page.locator("#steps details")
        assert refused.locator(".text").is_hidden()
        refused.locator("summary").press("Enter")
        assert refused.inner_text().split("\n\n") == ["Refused text · likelihood −9.25", "A wrong step."]
        assert page.inner_text("#answer") == "It is 12."
        live = {
            name: page.inner_text(f"#{name}") for name in ("running", "queued", "steps-accepted", "tokens-accepted")
        }
        assert live == {"running": "3", "queued": "–", "steps-accepted": "75%", "tokens-accepted": "–"}
        wait_for_text(page, "#rate", "0")
        assert [body["model"] for body in service.bodies] == ["pair", "pair@target"]
        assert service.bodies[0]["stepspec"] == {"events": True}


def test_a_dark_phone_scrolls_in_one_direction_alone(browser: Any) -> None:
    service = ScriptedService()
    service.release.set()
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "reduced_motion": "reduce"}
    with listening(service.app) as address, opened(browser, address, **phone) as page:
        wait_for_text(page, "#ratio", "1.8×")
        assert [each for each in FIRST_SCREEN if not is_in_sight(page, each)] == []
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert int(red) < 60
        assert page.locator(".step").first.evaluate("each => getComputedStyle(each).animationName") == "none"
        page.set_viewport_size({"width": 360, "height": 640})
        ask(page, "x" * 300)
        wait_for_text(page, "#ratio", "1.8×")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_policies_stop_errors_and_hostile_texts(browser: Any) -> None:
    service = ScriptedService()
    with listening(service.app) as address, opened(browser, address, "?example=0") as page:
        page.locator("#model option").nth(2).wait_for(state="attached")  # the page asks the service for them
        assert page.locator("#model option").all_inner_texts() == ["two-level (default)", "target", "token"]
        assert service.bodies == []
        page.select_option("#model", label="token")
        page.uncheck("#compare")
        ask(page, "slow")
        wait_for_text(page, "#pending", "Proposed by the draft · not judged yetTwo.")
        page.focus("#stop")
        page.keyboard.press("Enter")
        wait_for_text(page, "#status", "Stopped.")
        assert page.inner_text("#ours small") == "not finished"
        assert page.is_hidden("#pending")
        assert service.left.wait(5)
        assert service.bodies[-1]["model"] == "pair@token"
        for question, sentence in {
            "busy": "The queue is full. Wait at least 7 s.",
            "proxy": "The service returned status 502.",
            "broken": "The connection broke off before the answer was complete. Ask again.",
            "failing": "A model failed.",
        }.items():
            ask(page, question)
            wait_for_text(page, "#error", sentence)
            assert page.get_attribute("#error", "role") == "alert"
        ask(page, "plain")
        wait_for_text(page, "#note", "The answer was cut off at the limit of tokens.")
        assert page.locator("#steps .text").all_inner_texts() == ["First."]
        assert page.inner_text("#answer") == "Then."
        ask(page, "hostile")
        wait_for_text(page, "#note", HOSTILE)
        assert page.is_hidden("#error")
        assert page.locator("#steps .text").all_text_contents() == [HOSTILE, HOSTILE]
        assert page.inner_text("#answer") == HOSTILE
        assert page.locator("main :is(img, script)").count() == 0
        assert page.title() == "stepspec"
        assert page.is_hidden("#target")
        assert {body["model"] for body in service.bodies} == {"pair@token"}


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Any) -> None:
    service = ScriptedService(key="sk-right")
    with listening(service.app) as address, opened(browser, address) as page:
        for key in ("sk-wrong", "sk-right"):
            page.fill("#key", key)
            page.press("#key", "Enter")
            if key == "sk-wrong":
                wait_for_text(page, "#error", "The API key is missing or unknown.")
        page.wait_for_selector("#key-form", state="hidden")
        assert page.is_hidden("#error")
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [
            ["sk-right"],
            0,
            "",
        ]
        page.reload()
        page.wait_for_selector("#go:enabled")
        assert service.bodies == []  # a question would count against the key's limits
        service.release.set()
        page.click("#go")
        wait_for_text(page, "#ratio", "1.8×")


def test_the_real_service_has_the_page(browser: Any) -> None:
    app = create_app(following_pair(), "specreason")
    with listening(app) as address:
        with opened(browser, address) as page:
            page.wait_for_selector("#ratio", state="visible")
            wait_for_text(page, "#answer", "You said 1 things")
            assert page.locator("#steps .text").all_inner_texts() == [
                "What is asked is clear.",
                "Nothing else is needed.",
            ]
            wait_for_text(page, "#steps-accepted", "%")
        for path in ("", "page.js", "page.css"):
            response = httpx.get(address + path)
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-cache"
        assert not {"/", "/page.js"} & httpx.get(f"{address}openapi.json").json()["paths"].keys()
