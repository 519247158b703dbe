"""Write the measured figures into the embedded pair's model card: `python -m evals.training.card`.

The prose of the card, `README.md`, is written by hand. The tables between its markers come from the weights and from
`figures.json` beside them, which `python -m evals.training.measure PART --save` writes.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evals.bench.results import with_block
from evals.training.measure import BATCHES, PASS_TOKENS
from stepspec.base.files import file_hash
from stepspec.mini import WEIGHTS

Figures = dict[str, Any]


def with_figures(card: str, folder: Path) -> str:
    """Return the card with new tables from the files in the card's folder.

    Raises:
        UsageError: a marker is missing in the card.
    """
    figures: Figures = json.loads((folder / "figures.json").read_text())
    blocks = {name: block(figures[name]) for name, block in BLOCKS.items() if name in figures}
    for name, block in (blocks | {"hashes": _hashes(folder)}).items():
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
    path = WEIGHTS / "README.md"
    path.write_text(with_figures(path.read_text(encoding="utf-8"), WEIGHTS), encoding="utf-8")


if __name__ == "__main__":
    main()
