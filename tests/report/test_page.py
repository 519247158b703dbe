"""The page in a real browser: from the disk, offline, with mouse and keyboard, and with hostile model output."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from make_runs import MadeRun, make_run
from pages import Window, chromium, needs_chromium, page_of

from evals.bench.results import read_results
from stepspec.evaluation.report.page import make_page
from stepspec.evaluation.report.source import read_source
from stepspec.evaluation.runs import find_runs

pytestmark = needs_chromium
STORED = Path(__file__).parents[2] / "evals" / "results" / "gsm-mini"

Open = Callable[..., Window]


@pytest.fixture(scope="module")
def made() -> MadeRun:
    return make_run(40, policies=["target", "token", "draft", "two-level"])


@pytest.fixture(scope="module")
def file(made: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("page"), made)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def window(browser) -> Iterator[Open]:
    """Return a function that opens pages. Teardown checks for console errors and for requests to the network."""
    opened: list[Window] = []

    def open_window(file: Path, fragment: str = "", **settings: object) -> Window:
        opened.append(Window(browser, **settings))
        opened[-1].open(file, fragment)
        return opened[-1]

    yield open_window
    for each in opened:
        assert each.errors == []
        assert [url for url in each.requests if not url.startswith(("file:", "data:,"))] == []
        each.context.close()


def statuses(made: MadeRun, policy: str) -> dict[str, bool]:
    return {row.problem: row.status == "correct" for row in made.rows if row.policy == policy}


def test_the_page_opens_from_the_disk_with_a_finding_a_table_and_figures(
    window: Open, file: Path, made: MadeRun
) -> None:
    page = window(file).page
    assert "as fast as the target alone" in page.locator("h1").inner_text()
    assert page.locator("thead").first.inner_text().count("exact") == len(made.run.policies)
    figures = page.locator("figure svg").all()
    assert len(figures) == 5 + 1
    assert all(figure.bounding_box()["height"] > 100 for figure in figures[:3])


def test_the_page_shows_the_prompt_of_the_first_problem(window: Open, made: MadeRun, tmp_path: Path) -> None:
    prompt = "<|user|>What is <b>2 & 2</b>?<|end|>"
    page = window(page_of(tmp_path, replace(made, run=made.run.model_copy(update={"first_prompt": prompt})))).page
    page.get_by_text("The prompt of the first problem").click()
    assert page.locator("details[open] pre").inner_text() == prompt


def test_filters_match_the_rows(window: Open, file: Path, made: MadeRun) -> None:
    shown = window(file)
    target, here = statuses(made, "target"), statuses(made, "draft")
    shown.role("policy").select_option("draft")
    shown.role("show").select_option("lost")
    lost = [problem for problem in target if target[problem] and not here[problem]]
    assert shown.listed() == lost != []
    assert shown.role("count").inner_text() == f"{len(lost)} of 40"
    assert shown.column(1).get_attribute("aria-label") == "draft"
    shown.role("show").select_option("everywhere")
    all_wrong = set(target)
    for policy in made.run.policies:
        all_wrong -= {problem for problem, right in statuses(made, policy).items() if right}
    assert set(shown.listed()) == all_wrong
    shown.role("show").select_option("truncated")
    cut = {row.problem for row in made.rows if row.policy == "draft" and row.finish_reason == "length"}
    assert set(shown.listed()) == cut
    shown.role("show").select_option("all")
    shown.role("level").select_option("2")
    assert len(shown.listed()) == 8


def test_the_search_finds_ids_and_words_inside_steps(window: Open, file: Path, made: MadeRun) -> None:
    shown = window(file)
    shown.role("search").fill("made-0007")
    assert shown.listed() == ["made-0007"]
    trace = next(trace for trace in made.traces if trace.policy == "two-level" and trace.problem == "made-0021")
    shown.role("search").fill((trace.steps[2].text or "").strip())
    shown.page.wait_for_function("document.querySelectorAll('.item').length === 1")
    assert shown.listed() == ["made-0021"]
    shown.role("search").fill("no such words")
    assert shown.role("none").is_visible()


def test_the_keyboard_moves_through_problems_steps_and_columns(window: Open, file: Path) -> None:
    shown = window(file)
    keyboard = shown.page.keyboard
    shown.role("list").focus()
    keyboard.press("ArrowDown")
    keyboard.press("ArrowDown")
    shown.page.wait_for_function("document.querySelector('.detail h3').textContent === 'made-0002'")
    assert shown.page.locator(".item[aria-selected]").inner_text().startswith("made-0002")
    keyboard.press("Enter")
    assert shown.focused().startswith("1 target")
    keyboard.press("ArrowDown")
    keyboard.press("ArrowDown")
    assert shown.focused().startswith("3 target")
    keyboard.press("ArrowRight")
    assert re.match(r"1 (draft|salvaged|target)", shown.focused())
    keyboard.press("ArrowLeft")
    assert shown.focused().startswith("3 target")
    keyboard.press("n")
    shown.page.wait_for_function("document.querySelector('.detail h3').textContent === 'made-0003'")
    shown.page.wait_for_function("document.activeElement.classList.contains('step')")
    assert shown.focused().startswith("1 target")
    keyboard.press("Escape")
    keyboard.press("End")
    shown.page.wait_for_function("document.querySelector('.detail h3').textContent === 'made-0039'")
    keyboard.press("/")
    assert shown.page.evaluate("document.activeElement.type") == "search"


def test_two_policies_are_shown_side_by_side(window: Open, file: Path, made: MadeRun) -> None:
    shown = window(file)
    shown.role("search").fill("made-0005")
    shown.column(0).locator("select").select_option(label="two-level")
    shown.column(1).locator("select").select_option(label="draft")
    for side, policy in enumerate(("two-level", "draft")):
        trace = next(each for each in made.traces if (each.problem, each.policy) == ("made-0005", policy))
        steps = shown.column(side).locator(".step")
        assert steps.locator(".text").all_inner_texts() == [(step.text or "").strip() for step in trace.steps]
        captions = steps.locator(".told").all_inner_texts()
        for words, step in zip(captions, trace.steps, strict=True):
            assert step.origin in words
            assert f"{step.num_tokens} tokens" in words
            assert all(judge in words for judge in step.scores)
            assert ("refused" in words) == (step.origin != "draft")
        assert shown.column(side).locator(".answer").inner_text() == trace.answer
        row = next(each for each in made.rows if (each.problem, each.policy) == ("made-0005", policy))
        text = shown.column(side).inner_text()
        assert ("correct" if row.status == "correct" else row.why or "") in text


def test_the_address_restores_the_view(window: Open, file: Path) -> None:
    shown = window(file, "#run=r0&problem=made-0033&left=token&right=two-level&repeat=0&rightstep=3")
    assert shown.problem() == "made-0033"
    assert [shown.column(side).get_attribute("aria-label") for side in (0, 1)] == ["token", "two-level"]
    assert shown.focused().startswith("3 ")
    shown.page.keyboard.press("ArrowDown")
    there = shown.page.evaluate("location.hash")
    again = window(file, there)
    assert (again.problem(), again.focused()[:2]) == ("made-0033", "4 ")
    again.page.evaluate("location.hash = '#run=r0&problem=made-0001'")
    again.page.wait_for_function("document.querySelector('.detail h3').textContent === 'made-0001'")


def test_an_invalid_address_is_ignored(window: Open, file: Path) -> None:
    shown = window(file, "#run=r0&problem=x&left=y&rightstep=-7")
    for fragment in ("#run=r9&problem=x", "#%", "#r0-figures"):
        shown.page.evaluate("fragment => { location.hash = fragment }", fragment)
    assert shown.problem() == "made-0000"


def background(shown: Window) -> int:
    colour = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)))


def test_the_theme_follows_the_system_and_the_button(window: Open, file: Path) -> None:
    light, dark = window(file, color_scheme="light"), window(file, color_scheme="dark")
    assert background(light) > 700
    assert background(dark) < 100
    button = dark.page.locator("#theme")
    button.click()
    assert button.inner_text() == "Theme: light"
    assert background(dark) == background(light)
    dark.open(file)
    assert background(dark) == background(light), "the choice is saved"
    button.click()
    assert background(dark) < 100


def contrast(shown: Window, selector: str) -> float:
    """Return the lowest contrast of a text to the page and to the cards (WCAG 2.2, 1.4.3)."""
    colours = shown.page.evaluate(
        """selector => {
            const root = getComputedStyle(document.documentElement);
            const colour = getComputedStyle(document.querySelector(selector)).color;
            const paint = value => { const probe = document.createElement('i'); probe.style.color = value;
                document.body.append(probe); const found = getComputedStyle(probe).color; probe.remove();
                return found; };
            return [colour, paint(root.getPropertyValue('--page')), paint(root.getPropertyValue('--card'))];
        }""",
        selector,
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    text, *backs = map(luminance, colours)
    return min((max(text, back) + 0.05) / (min(text, back) + 0.05) for back in backs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast(window: Open, file: Path, scheme: str) -> None:
    shown = window(file, color_scheme=scheme)
    for selector in ("h1", ".eyebrow", "td small", "figcaption", ".right", ".wrong", ".told b", ".contents a"):
        assert contrast(shown, selector) >= 4.5, selector


def test_the_page_fits_a_phone_without_horizontal_scrolling(window: Open, file: Path) -> None:
    shown = window(file, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 360
    table = shown.page.locator(".scroll").first
    name = table.locator("tbody th[scope=row]").first
    before = name.bounding_box()
    table.evaluate("element => element.scrollLeft = 120")
    assert table.evaluate("element => element.scrollLeft") == 120
    assert name.bounding_box()["x"] == before["x"], "the column of row names does not scroll"
    shown.page.locator(".item").nth(3).click()
    assert shown.problem() == "made-0003"
    heights = "[...document.querySelectorAll('figure svg text')].map(text => text.getBoundingClientRect().height)"
    assert min(height for height in shown.page.evaluate(heights) if height) >= 9


def test_long_names_do_not_widen_the_page_on_a_phone(window: Open, tmp_path: Path) -> None:
    made = make_run(4, policies=["target", "two-level"])
    renamed = {"target": "target", "two-level": "policies/" + "a_name_without_a_place_to_break_" * 4}
    made.rows = [row.model_copy(update={"policy": renamed[row.policy]}) for row in made.rows]
    policies = {renamed[name]: record for name, record in made.run.policies.items()}
    made.run, made.blocks, made.traces = made.run.model_copy(update={"policies": policies}), [], []
    shown = window(page_of(tmp_path, made), viewport={"width": 360, "height": 740})
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 360


def test_print_is_light_and_omits_the_problems(window: Open, file: Path) -> None:
    shown = window(file, color_scheme="dark")
    printed = shown.page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert len(printed) > 30_000
    shown.page.emulate_media(media="print")
    assert not shown.page.locator(".problems").is_visible()
    assert shown.page.locator("figure").first.is_visible()
    assert shown.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"


def test_hostile_model_output_is_not_executed(window: Open, tmp_path: Path) -> None:
    hostile = make_run(6, hostile=True, policies=["target", "two-level"])
    nasty = '</script><img src=x onerror="window.hacked=1">'
    renamed = {"two-level": nasty}
    hostile.rows = [
        row.model_copy(
            update={"policy": renamed.get(row.policy, row.policy), "gold": nasty, "why": nasty, "answer": nasty}
        )
        for row in hostile.rows
    ]
    hostile.traces = [
        trace.model_copy(update={"policy": renamed.get(trace.policy, trace.policy)}) for trace in hostile.traces
    ]
    policies = {renamed.get(name, name): record for name, record in hostile.run.policies.items()}
    engines = {"target": hostile.run.engines["target"].model_copy(update={"name": nasty})}
    changes = {"policies": policies, "benchmark": nasty, "engines": engines}
    hostile.run = hostile.run.model_copy(update=changes)
    hostile.blocks = []
    shown = window(page_of(tmp_path, hostile))
    shown.role("policy").select_option(nasty)
    for _ in range(6):
        shown.role("list").press("ArrowDown")
    assert nasty in shown.column(1).locator(".step .text").first.inner_text()
    assert nasty in shown.page.locator(".gold").inner_text()
    assert nasty in shown.page.locator("thead").first.inner_text()
    assert shown.page.evaluate("window.hacked") is None
    assert shown.page.locator("img").count() == 0


def test_the_content_security_policy_allows_only_the_scripts_of_the_page(window: Open, file: Path) -> None:
    policy = window(file).page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy.startswith("default-src 'none'")
    scripts = re.search(r"script-src ([^;]*)", policy)[1].split()
    assert len(scripts) == 2
    assert all(script.startswith("'sha256-") for script in scripts)


def test_without_traces_the_page_shows_outcomes(window: Open, tmp_path: Path) -> None:
    shown = window(page_of(tmp_path, make_run(12, policies=["target", "draft"]), traces=False, figures=False))
    shown.role("show").select_option("lost")
    assert shown.listed()
    assert shown.page.locator(".step").count() == 0
    assert shown.column(1).locator(".strip i").count() > 3
    assert "not in this page" in shown.column(1).inner_text()


def test_an_old_browser_gets_a_message(browser, file: Path) -> None:
    shown = Window(browser)
    shown.page.add_init_script("delete window.DecompressionStream")
    shown.open(file)
    assert "too old" in shown.role("detail").inner_text()
    assert shown.errors == []


def test_a_repeat_can_be_selected_and_correct_repeats_are_counted(window: Open, tmp_path: Path) -> None:
    repeated = make_run(4, num_repeats=3, policies=["target", "two-level"])
    shown = window(page_of(tmp_path, repeated, figures=False))
    right = sum(
        row.status == "correct" for row in repeated.rows if (row.problem, row.policy) == ("made-0000", "target")
    )
    assert shown.page.locator(".item .mark").first.inner_text() == str(right)
    shown.role("repeat").select_option("2")
    trace = next(
        each for each in repeated.traces if (each.problem, each.policy, each.repeat) == ("made-0000", "target", 2)
    )
    assert shown.column(0).locator(".step .text").first.inner_text() == (trace.steps[0].text or "").strip()


def test_filters_apply_to_the_selected_repeat(window: Open, tmp_path: Path) -> None:
    made = make_run(12, num_repeats=2, policies=["target", "draft"])
    right = {(row.policy, row.problem, row.repeat): row.status == "correct" for row in made.rows}
    lost = [
        [
            problem
            for problem in statuses(made, "target")
            if right["target", problem, each] > right["draft", problem, each]
        ]
        for each in (0, 1)
    ]
    assert lost[0] != lost[1], "the repeats of the made-up run must differ, or this test checks nothing"
    shown = window(page_of(tmp_path, made, figures=False))
    shown.role("policy").select_option("draft")
    shown.role("show").select_option("lost")
    for repeat in (0, 1):
        shown.role("repeat").select_option(str(repeat))
        assert shown.listed() == lost[repeat] != []
        for problem in lost[repeat]:
            shown.page.locator(".item", has_text=problem).click()
            shown.page.wait_for_function(f"document.querySelector('.detail h3').textContent === '{problem}'")
            assert "✓ correct" in shown.column(0).inner_text()
            assert "✓ correct" not in shown.column(1).inner_text()


def test_a_sweep_shows_one_setting_at_a_time(window: Open, tmp_path: Path) -> None:
    sweep = [make_run(8, concurrency=each, policies=["target", "token"]) for each in (1, 16)]
    shown = window(page_of(tmp_path, *sweep, figures=False))
    assert shown.page.locator("article:visible").count() == 1
    assert shown.page.locator(".sweep figure").count() == 3
    shown.page.locator("#setting").select_option(label="concurrency 16")
    assert "concurrency 16" in shown.page.locator("article:visible .eyebrow").inner_text()
    shown.page.locator(".sweep a", has_text="concurrency 1").first.click()
    shown.page.wait_for_selector("article#r0:visible")
    assert shown.listed() == [f"made-000{number}" for number in range(8)]


def test_a_stored_run_without_rows_has_a_page(window: Open, tmp_path: Path) -> None:
    file, folder = tmp_path / "report.html", find_runs(STORED)[0]
    file.write_text(make_page([read_source(folder, read_results(STORED)[0][1])]), "utf-8")
    page = window(file).page
    assert "target" in page.locator("h1").inner_text()
    assert page.locator("figure").count() >= 3
    assert page.locator("section.problems").count() == 0
