"""Write the measured figures into a pair's model card: `python -m stepspec.mini.card --pair NAME`.

The prose of the card, `README.md`, is written by hand. The tables between its markers come from files beside it, which
`python -m stepspec.mini.measure PART --save` and `python -m stepspec.mini.smol.answers` write, from the weights, and
for `smol` from runs under `evals/results/smol/`.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepspec.api.pairs import file_hash
from stepspec.base.files import package_folder
from stepspec.evaluation.report import Results, read_results, with_block
from stepspec.evaluation.report.cells import joined, percent_with_interval
from stepspec.mini.measure import BATCHES, CARDS, PASS_TOKENS

Figures = dict[str, Any]
RESULTS = package_folder().parent / "evals" / "results" / "smol"
MAX_SHOWN = 400


def with_figures(card: str, folder: Path) -> str:
    """Return a pair's card with new tables from the files in the card's folder.

    Raises:
        UsageError: a marker is missing in the card.
    """
    figures: Figures = json.loads((folder / "figures.json").read_text())
    blocks = {name: block(figures[name]) for name, block in BLOCKS.items() if name in figures}
    if (folder / "target").exists():
        blocks["hashes"] = _hashes(folder)
    else:
        accuracies = _accuracy(read_results(RESULTS / "accuracy"), read_results(RESULTS / "base"))
        blocks |= {"accuracy": accuracies, "answers": _answers(folder / "answers.json")}
    for name, block in blocks.items():
        card = with_block(card, "figures", name, block)
    return card


def _hashes(folder: Path) -> str:
    files = {role: folder / role / "model.safetensors" for role in ("target", "draft")}
    return "\n".join(f"- {role} `{file_hash(file)}`" for role, file in files.items())


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = tuple(":--" if index == 0 else "--:" for index in range(len(header)))
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _share(figures: Figures) -> str:
    low, high = figures["interval"]
    return f"{100 * figures['share']:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _area(figures: Figures) -> str:
    return _number(figures["area"], 4)


def _solutions(figures: Figures) -> str:
    target, draft = figures["target"], figures["draft"]
    rows = [
        (f"problems solved, n = {figures['problems']:,}", _share(target["solved"]), _share(draft["solved"])),
        ("steps", f"{target['steps']:,}", f"{draft['steps']:,}"),
        ("of which right", _share(target["right_steps"]), _share(draft["right_steps"])),
        ("tokens of a step, mean", _number(target["mean_step_tokens"], 1), _number(draft["mean_step_tokens"], 1)),
        (
            "5% and 95% of steps are no longer than",
            *("{} and {}".format(*each["step_tokens_5_to_95_percent"]) for each in (target, draft)),
        ),
    ]
    return _table(("", "target", "draft"), rows)


def _judging(figures: Figures) -> str:
    rows = [
        (name, _area(each), *(f"{point['wrong_accepted']:.1%}" for point in each["right_accepted"].values()))
        for name, each in sorted(figures["scores"].items())
    ]
    shares = next(iter(figures["scores"].values()))["right_accepted"]
    table = _table(("score", "area", *(f"wrong with {share} right" for share in shares)), rows)
    equivalence, selection = figures["equivalence"], figures["selection"]
    return (
        f"{figures['steps']:,} steps of {figures['problems']:,} problems, {figures['right']:,} of them right "
        f"({100 * figures['right'] / figures['steps']:.1f}%).\n\n{table}\n\n"
        f"Equivalence: area {_area(equivalence)} ({equivalence['pairs']:,} pairs, {equivalence['same']:,} of "
        f"them the same). Selection: {_share(selection)} of {selection['n']:,} right."
    )


def _acceptance(figures: Figures) -> str:
    rows = [
        (name, f"{100 * each['share']:.1f}%", f"{each['drafted']:,}")
        for name, each in figures.items()
        if name != "problems"
    ]
    return _table(("", "accepted", "drafted"), rows)


def _cost(figures: Figures) -> str:
    rows = [(name, _number(milliseconds)) for name, milliseconds in figures["ms"].items()]
    return (
        f"{_table(('', 'ms, median'), rows)}\n\nA draft token costs {figures['draft_over_target']:.3f} of one of "
        f"the target ({figures['problems']} problems in turn, {figures['threads']} threads)."
    )


def _passes(figures: Figures) -> str:
    rows = [
        (f"{batch}", *(_number(figures["ms"][f"{batch} x {length}"], 0) for length in PASS_TOKENS)) for batch in BATCHES
    ]
    header = ("milliseconds for concurrent requests", *(f"{length} tokens" for length in PASS_TOKENS))
    return f"{_table(header, rows)}\n\nMedian of {figures['turns']} passes, {figures['threads']} threads."


def _probes(figures: Figures) -> str:
    rows = [
        (count, f"{figures['passes'][count]:g}", _number(milliseconds, 1))
        for count, milliseconds in figures["ms"].items()
    ]
    table, lengths = (
        _table(("questions", "passes", "ms, median"), rows),
        ", ".join(map(str, figures["question_tokens"])),
    )
    return (
        f"{table}\n\nA step of {figures['step_tokens']} tokens, questions of {lengths} tokens, {figures['threads']} "
        "threads."
    )


def _accuracy(runs: Results, of_base: Results) -> str:
    """Return a table of the share of correct answers by benchmark and model, with intervals.

    Args:
        runs: runs of target and draft.
        of_base: runs of the untouched base as the target.
    """
    base = {run.benchmark: summary.policies["target"] for run, summary in of_base}
    rows: list[tuple[str, ...]] = []
    for run, summary in runs:
        found = (summary.policies["target"], summary.policies["draft"], base.get(run.benchmark))
        shares = (joined(percent_with_interval(each.accuracy, each.accuracy_ci)) if each else "–" for each in found)
        rows.append((run.benchmark, f"{summary.n:,}", *shares))
    return _table(("benchmark", "problems", "target", "draft", "untouched base"), rows)


def _answers(file: Path) -> str:
    """Return a list of questions with what the target wrote."""
    parts: list[str] = []
    for each in json.loads(file.read_text("utf-8")):
        right = f" (right: {each['right']})" if each["right"] else ""
        answer = f"**{_line(each['answer'])}**" if each["answer"] else "no answer"
        parts.append(
            f"- {_line(each['question'])}{right}\n  {' → '.join(filter(None, (_line(each['steps']), answer)))}"
        )
    return "\n".join(parts)


def _line(text: str) -> str:
    """Return a text in one line of Markdown, cut at `MAX_SHOWN` characters."""
    line = " / ".join(part.strip() for part in text.splitlines() if part.strip()).replace("*", "\\*")
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} [...]"


BLOCKS: Mapping[str, Callable[[Figures], str]] = {
    "solutions": _solutions,
    "judging": _judging,
    "acceptance": _acceptance,
    "cost": _cost,
    "passes": _passes,
    "probes": _probes,
}
"""The tables made from each part of `figures.json`."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m stepspec.mini.card", description="Write the tables of a card.")
    parser.add_argument("--pair", choices=list(CARDS), default="embedded", help="the pair (default: embedded)")
    folder = CARDS[parser.parse_args().pair].folder
    path = folder / "README.md"
    path.write_text(with_figures(path.read_text(encoding="utf-8"), folder), encoding="utf-8")


if __name__ == "__main__":
    main()
