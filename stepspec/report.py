"""Tables from a summary: the one that closes an evaluation, `report.md`, and the block in a README.

    python -m stepspec.report --readme README.md evals/results/gsm-mini

rewrites what stands in the README between `<!-- results:NAME -->` and `<!-- /results -->`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich import box
from rich.table import Table
from rich.text import Text

from stepspec.errors import StepSpecError, UsageError
from stepspec.records import PolicySummary, RunRecord, Summary

UNKNOWN = "–"
END_MARKER = "<!-- /results -->"

Cell = tuple[str, str]
"""A value and its interval; either may be empty."""


@dataclass(frozen=True)
class Column:
    """One figure of every policy, as it is written in every table."""

    title: str
    meaning: str
    cell: Callable[[PolicySummary], Cell]


def _percent(value: float | None, *, sign: str = "") -> str:
    return UNKNOWN if value is None else f"{100 * value:{sign}.1f}%"


def _percent_with_interval(
    value: float | None, interval: tuple[float, float] | None, *, sign: str = ""
) -> Cell:
    if value is None or interval is None:
        return _percent(value, sign=sign), ""
    return _percent(value, sign=sign), f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def _times(value: float | None, interval: tuple[float, float] | None = None) -> Cell:
    if value is None:
        return UNKNOWN, ""
    # A policy against itself is 1 by definition, with nothing to estimate.
    wide = interval is not None and interval[0] < interval[1]
    return f"{value:.2f}×", f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval and wide else ""


def _number(value: float | None) -> Cell:
    return (UNKNOWN if value is None else f"{value:.2f}"), ""


COLUMNS: Sequence[Column] = (
    Column(
        "accuracy",
        "share of problems answered correctly, with Wilson's interval",
        lambda each: _percent_with_interval(each.accuracy, each.accuracy_ci),
    ),
    Column(
        "vs target",
        "accuracy minus the target's on the same problems, in points, with Tango's interval",
        lambda each: _percent_with_interval(each.accuracy_delta, each.accuracy_delta_ci, sign="+"),
    ),
    Column(
        "speedup",
        "wall time of the target over that of the policy, on the same problems",
        lambda each: _times(each.speedup_vs_target, each.speedup_vs_target_ci),
    ),
    Column(
        "vs token",
        "wall time of token-level speculation over that of the policy",
        lambda each: _times(each.speedup_vs_token, each.speedup_vs_token_ci),
    ),
    Column(
        "steps accepted",
        "of the draft's steps that were judged",
        lambda each: (_percent(each.step_acceptance), ""),
    ),
    Column(
        "tokens accepted",
        "of the tokens drafted by token-level speculation",
        lambda each: (_percent(each.token_acceptance), ""),
    ),
    Column(
        "tokens per pass",
        "tokens committed per forward pass of the target",
        lambda each: _number(each.tokens_per_target_pass),
    ),
    Column("length", "tokens committed over the target's", lambda each: _times(each.length_ratio)),
    Column(
        "judging",
        "share of the wall time in the judge and the controller",
        lambda each: (_percent(each.judge_controller_share), ""),
    ),
)


def closing_table(summary: Summary) -> Table:
    """The table for a terminal, intervals below the values."""
    title = f"{summary.benchmark}: {_count(summary.n, 'problem')}, 95% intervals"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy")
    for column in COLUMNS:
        table.add_column(column.title, justify="right")
    for name, policy in summary.policies.items():
        cells = [Text("\n".join(part for part in column.cell(policy) if part)) for column in COLUMNS]
        table.add_row(Text(name), *cells)
    return table


def readme_table(summary: Summary) -> str:
    """The same table in Markdown, without a final newline."""
    lines = [
        _markdown_row(["policy", *(column.title for column in COLUMNS)]),
        _markdown_row([":--", *("--:" for _ in COLUMNS)]),
    ]
    for name, policy in summary.policies.items():
        cells = [" ".join(part for part in column.cell(policy) if part) for column in COLUMNS]
        lines.append(_markdown_row([name.replace("|", "\\|"), *cells]))
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def conditions_sentence(run: RunRecord, summary: Summary) -> str:
    """One sentence with everything that the figures depend on."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    parts = [
        f"{run.benchmark}, {_count(summary.n, 'problem')} under every policy",
        f"temperature {run.temperature:g}, concurrency {run.concurrency}, seed {run.seed}",
        f"at most {run.max_tokens:,} tokens a problem, prompt {run.prompt_id!r}",
        _models(run),
        _hardware(run),
        versions,
        f"commit {run.commit[:12] + run.commit[40:]}" if run.commit else "commit unknown",
    ]
    return f"{'; '.join(parts)}."


def _models(run: RunRecord) -> str:
    loaded = {role: engine for role, engine in run.engines.items() if engine is not None}
    described = [
        " ".join(
            part
            for part in (role, engine.name, engine.dtype, engine.device and f"on {engine.device}")
            if part
        )
        for role, engine in loaded.items()
    ]
    return ", ".join([*described, f"pair {run.pair}"])


def _hardware(run: RunRecord) -> str:
    known = run.hardware
    parts = [str(known["gpu"])] if "gpu" in known else []
    parts.append(f"{known.get('cpu', 'unknown processor')}, {known.get('cores', '?')} cores")
    if "memory_bytes" in known:
        parts.append(f"{float(known['memory_bytes']) / 2**30:.0f} GiB of memory")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def markdown_report(run: RunRecord, summary: Summary) -> str:
    """`report.md`: the conditions, the table, and what its columns mean."""
    meanings = [f"- **{column.title}**: {column.meaning}" for column in COLUMNS]
    losses = [
        f"- {name}: accuracy lost against the target is at most {_percent(policy.accuracy_loss_upper95)} "
        "(one-sided 95% bound)"
        for name, policy in summary.policies.items()
        if policy.accuracy_loss_upper95 is not None
    ]
    cut = [
        f"- {name}: {policy.truncated:,} truncated, {policy.no_answer:,} without an answer, of "
        f"{_count(policy.n, 'problem')}"
        for name, policy in summary.policies.items()
    ]
    blocks = [
        f"# {run.benchmark}",
        conditions_sentence(run, summary),
        readme_table(summary),
        "Intervals are 95%; those of ratios are bootstrapped over problems.",
        "\n".join(meanings),
        "\n".join([*losses, *cut]),
        f"Started {run.started}.",
    ]
    return "\n\n".join(blocks) + "\n"


def readme_block(run: RunRecord, summary: Summary) -> str:
    """What a README shows between the markers: the table and its conditions."""
    return f"{readme_table(summary)}\n\n{conditions_sentence(run, summary)} Intervals are 95%."


def with_block(text: str, benchmark: str, block: str) -> str:
    """The text with what stands between the markers of that benchmark replaced.

    Raises:
        UsageError: the markers are not there.
    """
    marker = f"<!-- results:{benchmark} -->"
    before, found, rest = text.partition(marker)
    _, end, after = rest.partition(END_MARKER)
    if not found or not end:
        raise UsageError(
            f"There is no {marker} with {END_MARKER} after it; add both where the table belongs."
        )
    return f"{before}{marker}\n{block}\n{END_MARKER}{after}"


def read_results(folder: Path) -> tuple[RunRecord, Summary]:
    """The conditions and the summary of a run that is finished.

    Raises:
        UsageError: the folder does not hold both.
    """
    try:
        run = RunRecord.model_validate_json((folder / "run.json").read_bytes())
        return run, Summary.model_validate_json((folder / "summary.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{folder} does not hold a finished run: {error}.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites a README's block from a folder of results."""
    parser = argparse.ArgumentParser(prog="python -m stepspec.report", description=main.__doc__)
    parser.add_argument("--readme", type=Path, required=True, help="the file whose block is rewritten")
    parser.add_argument("results", type=Path, help="a folder with run.json and summary.json")
    options = parser.parse_args(arguments)
    try:
        run, summary = read_results(options.results)
        text = options.readme.read_text("utf-8")
        options.readme.write_text(with_block(text, summary.benchmark, readme_block(run, summary)), "utf-8")
    except OSError as error:
        print(f"Cannot rewrite {options.readme}: {error.strerror}.", file=sys.stderr)
        return 1
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
