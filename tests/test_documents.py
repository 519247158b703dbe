"""README and docs: generated sections are up to date, links resolve, and commands and examples are valid."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from commands import command_of

from evals.bench.documents import generated
from evals.bench.plots import PLOTS, images
from evals.bench.results import read_results
from stepspec.engines.thinking import ThinkingFormat
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.report.cells import times
from stepspec.evaluation.stats import MatchedPolicy, Paired, corrected_confidence, fastest
from stepspec.loop.policy import Policy
from stepspec.serve.completions import CompletionRequest
from stepspec.serve.fields import Speculation
from stepspec.serve.requests import ChatRequest
from stepspec.serve.responses_request import ResponsesRequest
from stepspec.serve.tokenize import TokenizeRequest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language on all pages."""
    return [block for page in PAGES for block in re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.S)]


def test_generated_sections_are_up_to_date() -> None:
    found = {file: file.read_text("utf-8") for file in generated(ROOT)}
    assert found == generated(ROOT), "Run python -m evals.bench documents."


def test_plots_show_the_figures_of_the_results() -> None:
    """Tooltips have the figures; lines and fonts depend on matplotlib's version."""
    stored = {file: file.read_text("utf-8") for file in (ROOT / PLOTS).glob("*.svg")}
    fresh = images(ROOT)
    assert stored.keys() == fresh.keys(), "Run python -m evals.bench documents."
    for file, text in fresh.items():
        titles = re.findall(r"<title>.*?</title>", text)
        assert titles
        assert re.findall(r"<title>.*?</title>", stored[file]) == titles, file


def test_no_headline_has_the_speed_of_a_policy_that_is_not_known_to_keep_the_accuracy() -> None:
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    headlines = dict(re.findall(r"<!-- headline:([\w-]+) -->\n(.*?)\n<!-- /headline -->", text, re.S))
    assert headlines.keys() == {"gsm-mini"}
    for name, headline in headlines.items():
        matched = [summary.matched for _, summary in read_results(ROOT / "evals" / "results" / name)]
        assert re.findall(r"\d+\.\d\d×", headline) == [times(each.speedup)[0] for each in matched if each]


RUNS = sorted((ROOT / "evals" / "results").rglob("summary.json"))


@pytest.mark.parametrize("file", RUNS, ids=lambda file: str(file.parent.relative_to(ROOT / "evals" / "results")))
def test_the_verdict_of_a_stored_run_follows_from_its_lost_and_won_problems(file: Path) -> None:
    ((run, summary),) = read_results(file.parent)
    others = {name: each for name, each in summary.policies.items() if name != BASELINE}
    confidence, claims = corrected_confidence(sum(not run.is_exact(name) for name in others)), list[MatchedPolicy]()
    for name, each in others.items():
        assert each.lost is not None
        assert each.won is not None
        pair = Paired(each.won, each.lost, each.num_compared or summary.n)
        assert (pair.difference, pair.interval()) == (
            pytest.approx(each.accuracy_delta),
            pytest.approx(each.accuracy_delta_ci),
        )
        assert pair.loss_upper() == pytest.approx(each.accuracy_loss_upper95)
        together = each.throughput if summary.concurrency > 1 else None
        claim = MatchedPolicy(
            name,
            each.speedup_vs_target,
            each.speedup_vs_target_ci,
            loss_upper=pair.loss_upper(confidence),
            exact=run.is_exact(name),
            why_no_speed=each.no_speed,
            throughput=together and together.speedup_vs_target,
        )
        claims.append(claim)
        kept = run.exact_in_words if claim.exact else "within a point" if claim.keeps(0.01) else "not known"
        assert each.accuracy_kept == (kept if each.no_speed is None else "not known")
    found = fastest(claims, 0.01)
    assert summary.matched is not None
    assert summary.matched.policy == (found.name if found else BASELINE)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size <= 150_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_heading_that_a_page_links_to_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = page.parent / file if file else page
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE) if heading else []
        names = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
        assert not heading or heading in names, target


def test_every_command_that_a_page_shows_has_its_options() -> None:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("stepspec ")]
    assert len(commands) >= 10
    for words in commands:
        num_names = 2 if words[1] == "costs" else 1
        command = command_of(*words[1 : 1 + num_names])
        known = {name for parameter in command.params for name in parameter.opts}
        assert [word for word in words if word.startswith("--") and word not in known] == [], words


def test_every_target_of_make_that_a_page_shows_exists() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    shown = {
        name for name in re.findall(r"\bmake ([a-z]+)`|^make ([a-z]+)", text, re.MULTILINE) for name in name if name
    }
    assert {"demo", "test"} <= shown
    assert shown <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_every_file_that_a_page_shows_is_valid() -> None:
    tables = [tomllib.loads(block) for block in blocks("toml")]
    formats = [table for table in tables if "opening" in table]
    assert [ThinkingFormat.model_validate(table) for table in formats]
    assert [Policy.model_validate(table) for table in tables if table not in formats]
    assert [json.loads(block) for block in blocks("json")]


def test_the_page_of_the_service_names_every_option_and_field() -> None:
    page = (ROOT / "docs" / "service.md").read_text("utf-8")
    quoted = set(re.findall(r"[\w./-]+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    options = {name for each in command_of("serve").params for name in each.opts if name.startswith("--")}
    assert options - {"--help"} <= quoted
    requests = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest)
    fields = {name for request in (*requests, Speculation) for name in request.model_fields}
    fields |= {name for request in requests for name in request.refusals}
    assert fields - {"text", "reasoning"} <= quoted
    assert {"text.format", "reasoning.effort"} <= quoted
