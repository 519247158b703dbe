"""The figures: well-formed SVG in the colors of the page, and only figures with data."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from make_runs import make_run

from evals.bench.results import read_results
from stepspec.evaluation.records import Summary, TokenRecord
from stepspec.evaluation.report.colours import PALETTE, series, without_values
from stepspec.evaluation.report.plots import Plot, plot_sections, sweep_plots
from stepspec.evaluation.report.plots.bars import fates
from stepspec.evaluation.report.tally import RunTally
from stepspec.evaluation.run import summarise
from stepspec.evaluation.stats import pareto_front

NASTY = "$x_1$ </text><script>"
STORED = Path(__file__).parents[2] / "evals" / "results" / "gsm-mini"


@pytest.fixture(scope="module")
def plots() -> list[Plot]:
    made = make_run(40)
    nasty = {"two-level": NASTY}
    made.rows = [row.model_copy(update={"policy": nasty.get(row.policy, row.policy)}) for row in made.rows]
    policies = {nasty.get(name, name): record for name, record in made.run.policies.items()}
    run = made.run.model_copy(update={"policies": policies})
    sections = plot_sections("k", run, summarise(run, made.rows, ()), RunTally.of(made.rows))
    return [plot for each in sections.values() for plot in each]


def test_every_figure_with_data_is_made(plots: list[Plot]) -> None:
    keys = {re.sub(r"\d+", "0", plot.key) for plot in plots}
    assert keys == {
        *("k-tradeoff", "k-time", "k-tokens"),
        *("k-0-scores-0", "k-0-answers-0", "k-0-calibration-0"),
    }


def test_figures_are_well_formed_and_use_only_the_colors_of_the_page(plots: list[Plot]) -> None:
    known = {f"var(--{name})" for name in PALETTE}
    for plot in plots:
        root = ElementTree.fromstring(plot.svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == plot.title
        assert root.get("aria-describedby") == f"{plot.key}-caption"
        assert "<style" not in plot.svg
        used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", plot.svg))
        assert used <= known | {"none"}, plot.key


def test_ids_differ_between_figures(plots: list[Plot]) -> None:
    ids = [found for plot in plots for found in set(re.findall(r'\bid="([^"]+)"', plot.svg))]
    assert len(ids) == len(set(ids)) > 0


def test_names_are_shown_verbatim(plots: list[Plot]) -> None:
    tradeoff = ElementTree.fromstring(plots[0].svg)
    texts = [element.text for element in tradeoff.iter("{http://www.w3.org/2000/svg}text")]
    assert NASTY in texts


def test_the_same_run_gives_the_same_figures() -> None:
    made = make_run(20, policies=["target", "two-level"])
    summary, tally = summarise(made.run, made.rows), RunTally.of(made.rows)
    assert plot_sections("a", made.run, summary, tally) == plot_sections("a", made.run, summary, tally)


def test_a_summary_without_rows_has_the_figures_of_its_totals() -> None:
    run, summary = read_results(STORED)[0]
    sections = plot_sections("k", run, summary, RunTally())
    assert [plot.key for each in sections.values() for plot in each] == ["k-tradeoff", "k-time", "k-tokens"]


def test_what_was_not_run_is_named_within_the_figure() -> None:
    run, summary = read_results(STORED)[0]
    tradeoff = plot_sections("k", run, summary, RunTally())["All policies"][0].svg
    (left,) = re.findall(r'translate\((-?[\d.]+) [\d.]+\)">\(not run: draft, always, specreason-decode\)<', tradeoff)
    assert float(left) > 0


def test_variants_of_a_policy_share_a_color_and_are_labelled_by_their_values() -> None:
    run, summary = read_results(STORED)[0]
    chosen = summary.policies["stepspec"]
    names = [f"fly:token.width={width}" for width in (2, 3)]
    policies = {name: summary.policies[name] for name in ("target", "token")} | dict.fromkeys(names, chosen)
    made = summary.model_copy(update={"policies": policies})
    plot = plot_sections("k", run, made, RunTally())["All policies"][0]
    image = ElementTree.fromstring(plot.image())
    texts = {element.text: element.get("style", "") for element in image.iter("{http://www.w3.org/2000/svg}text")}
    assert {"target", "token", "2", "3", "fly:token.width"} < texts.keys()
    assert not texts.keys() & {*names}
    shades = [re.findall(r"fill: [^;]*", texts[label]) for label in ("token", "2", "3")]
    assert shades[0] != shades[1] == shades[2]
    caption = " ".join(text for text in texts if text and "font-size: 11px; fill: var(--muted)" in texts[text])
    assert caption.endswith("Speeds that do not count are not shown.")
    assert plot.caption == caption
    top, bottom = (float(each.attrib["viewBox"].split()[3]) for each in (ElementTree.fromstring(plot.svg), image))
    assert bottom > top


def test_the_colors_of_a_sweep_are_those_of_its_policies() -> None:
    colours = series(["two-level", "two-level -2.5/-3", "token", "a:k=1:l=2", "a:k=2:l=1"], without_values)
    assert colours["two-level"] == colours["two-level -2.5/-3"] != colours["token"]
    assert colours["a:k=1:l=2"] == colours["a:k=2:l=1"] != colours["token"]


def test_the_pareto_front_contains_only_undominated_points() -> None:
    assert pareto_front([(1, 90), (2, 90), (2, 80), (3, 70), (1.5, 60)]) == [(2, 90), (3, 70)]
    assert pareto_front([]) == []


def test_the_parts_of_the_tokens_balance() -> None:
    tokens = TokenRecord(
        committed=95,
        accepted=60,
        salvaged=15,
        regenerated=20,
        forced=15,
        drafted=80,
        rejected=12,
        abandoned=8,
        discarded=3,
    )
    accepted, salvaged, regenerated, other, rejected, abandoned, discarded = parts = fates(tokens)
    assert accepted + salvaged + rejected + abandoned == tokens.drafted
    assert accepted + salvaged + regenerated + other == tokens.committed
    assert sum(parts) == tokens.drafted + 20 + 15 + discarded


def test_a_sweep_is_plotted_over_its_settings() -> None:
    def summary(concurrency: int) -> Summary:
        made = make_run(10, concurrency=concurrency, policies=["target", "token"])
        return summarise(made.run, made.rows, made.blocks)

    keys = [plot.key for plot in sweep_plots("s", [summary(4), summary(1)])]
    assert keys == ["s-problems-per-s", "s-throughput-ratio", "s-speedup"]
    assert list(sweep_plots("s", [summary(1), summary(1)])) == []


def test_the_target_is_neutral_and_neighboring_colors_differ() -> None:
    colours = series(["a", "target", *"bcdefghij"])
    assert colours["target"] == "series-0"
    assert all(colours[one] != colours[next_] for one, next_ in zip("abcdefghi", "bcdefghij", strict=True))
