"""Tables from a summary: the one that closes an evaluation, `report.md`, and the block in a README.

    python -m stepspec.report --readme README.md evals/results/gsm-mini

rewrites what stands in the README between `<!-- results:NAME -->` and `<!-- /results -->`, and the one sentence between
`<!-- headline:NAME -->` and `<!-- /headline -->`. Given the file of a `stepspec bench engine`, it rewrites the results
called `engine`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich import box
from rich.table import Table
from rich.text import Text

from stepspec.errors import StepSpecError, UsageError
from stepspec.records import EngineRecord, PolicySummary, RunRecord, Summary
from stepspec.speed import EngineSpeeds, speeds_markdown

UNKNOWN = "–"
HEADLINED = "stepspec"
"""The policy that the headline is about."""

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


def _percent_with_interval(value: float | None, interval: tuple[float, float] | None, *, sign: str = "") -> Cell:
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
        "accuracy gain",
        "accuracy minus the target's on the same problems, in points, with Tango's interval",
        lambda each: _percent_with_interval(each.accuracy_delta, each.accuracy_delta_ci, sign="+"),
    ),
    Column(
        "speedup",
        "wall time of the target over that of the policy, on the same problems",
        lambda each: _times(each.speedup_vs_target, each.speedup_vs_target_ci),
    ),
    Column(
        "speedup vs token",
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
        lambda each: (_percent(each.token_acceptance), "" if each.token_level_exact else "(not exact)"),
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
    """The table for a terminal: a line per figure, so that several policies fit into 80 columns."""
    title = f"{summary.benchmark}: {_count(summary.n, 'problem')}, 95% intervals"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("")
    for name in summary.policies:
        table.add_column(Text(name), justify="right", overflow="fold")
    for column in COLUMNS:
        cells = [column.cell(policy) for policy in summary.policies.values()]
        table.add_row(column.title, *(Text("\n".join(part for part in cell if part)) for cell in cells))
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
        f"{_models(run.engines)}, pair {run.pair}",
        _hardware(run.hardware),
        versions,
        _commit(run.commit),
    ]
    return f"{'; '.join(parts)}."


def _commit(commit: str | None) -> str:
    return f"commit {commit[:12] + commit[40:]}" if commit else "commit unknown"


def _models(engines: Mapping[str, EngineRecord | None]) -> str:
    loaded = {role: engine for role, engine in engines.items() if engine is not None}
    described = [
        " ".join(part for part in (role, engine.name, engine.dtype, engine.device and f"on {engine.device}") if part)
        for role, engine in loaded.items()
    ]
    return ", ".join(described)


def _hardware(known: Mapping[str, str | int | float]) -> str:
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


def headline(run: RunRecord, summary: Summary) -> str:
    """The sentence that a README opens with: speed and accuracy of our policy, with conditions and intervals.

    Raises:
        UsageError: the run did not compare our policy with the target and with token-level speculation.
    """
    ours, target = summary.policies.get(HEADLINED), summary.policies.get("target")
    if ours is None or target is None or ours.speedup_vs_token is None:
        raise UsageError(f"The headline needs a run of the policies target, token and {HEADLINED}.")
    cells = (
        _times(ours.speedup_vs_target, ours.speedup_vs_target_ci),
        _times(ours.speedup_vs_token, ours.speedup_vs_token_ci),
        _percent_with_interval(ours.accuracy, ours.accuracy_ci),
        _percent_with_interval(target.accuracy, target.accuracy_ci),
    )
    vs_target, vs_token, accuracy, reference = (" ".join(part for part in cell if part) for cell in cells)
    return (
        f"On {_count(summary.n, 'problem')} of {run.benchmark} with the embedded pair, the policy `{HEADLINED}` is "
        f"{vs_target} as fast as the target alone and {vs_token} as fast as token-level speculation; it answers "
        f"{accuracy} correctly, the target alone {reference} (temperature {run.temperature:g}, concurrency "
        f"{run.concurrency}, {_hardware(run.hardware)}; 95% intervals)."
    )


def with_block(text: str, kind: str, benchmark: str, block: str) -> str:
    """The text with what stands between the markers of that kind and benchmark replaced.

    Raises:
        UsageError: the markers are not there.
    """
    marker, end_marker = f"<!-- {kind}:{benchmark} -->", f"<!-- /{kind} -->"
    before, found, rest = text.partition(marker)
    _, end, after = rest.partition(end_marker)
    if not found or not end:
        raise UsageError(f"There is no {marker} with {end_marker} after it; add both where the text belongs.")
    return f"{before}{marker}\n{block}\n{end_marker}{after}"


def speeds_block(speeds: EngineSpeeds) -> str:
    """What a README shows of a benchmark of the torch engine: the table and its conditions."""
    plan, prompt = speeds.plan, "prompt" if speeds.synthetic else "prompt of gsm-mini"
    parts = [
        f"greedy, at most {plan.max_tokens} tokens after each {prompt}",
        f"medians of {plan.turns} paired turns",
        _models({"target": speeds.engine, "draft": speeds.draft}),
        _hardware(speeds.hardware),
        ", ".join(f"{name} {version}" for name, version in speeds.versions.items()),
        _commit(speeds.commit),
    ]
    return f"{speeds_markdown(speeds)}\n\n{'; '.join(parts)}."


def with_results(text: str, run: RunRecord, summary: Summary) -> str:
    """A README with its table made anew, and its headline if it has one."""
    text = with_block(text, "results", summary.benchmark, readme_block(run, summary))
    if f"<!-- headline:{summary.benchmark} -->" not in text:
        return text
    return with_block(text, "headline", summary.benchmark, headline(run, summary))


def read_speeds(file: Path) -> EngineSpeeds:
    """What a `stepspec bench engine` has found.

    Raises:
        UsageError: the file does not hold that.
    """
    try:
        return EngineSpeeds.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{file} does not hold the figures of a 'stepspec bench engine': {error}.") from error


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
    parser.add_argument("results", type=Path, help="a folder with run.json and summary.json, or a benchmark's file")
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text("utf-8")
        if options.results.is_file():
            text = with_block(text, "results", "engine", speeds_block(read_speeds(options.results)))
        else:
            text = with_results(text, *read_results(options.results))
        options.readme.write_text(text, "utf-8")
    except OSError as error:
        print(f"Cannot rewrite {options.readme}: {error.strerror}.", file=sys.stderr)
        return 1
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
