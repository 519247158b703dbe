"""README blocks that are generated from runs: tables with their conditions, and a headline."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepspec.base.files import list_data_files
from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, RunRecord, Summary
from stepspec.evaluation.report.cells import count, joined, percent_with_interval, times
from stepspec.evaluation.report.conditions import (
    conditions_sentence,
    hardware_in_words,
)
from stepspec.evaluation.report.figures import (
    ACCURACY,
    ACCURACY_GAIN,
    SPEEDUP,
    SPEEDUP_VS_TOKEN,
    STEPS_ACCEPTED,
)
from stepspec.evaluation.report.findings import speeds_that_do_not_count
from stepspec.evaluation.report.source import settings_of
from stepspec.evaluation.report.tables import markdown_table, readme_table, written
from stepspec.evaluation.runs import find_runs, read_run, read_summary
from stepspec.loop.policy import Policy

HEADLINED = "stepspec"
"""The policy that the headline is about."""

OVERVIEW = (ACCURACY, ACCURACY_GAIN, SPEEDUP, SPEEDUP_VS_TOKEN, STEPS_ACCEPTED)
"""The columns of an overview of several benchmarks."""

Results = Sequence[tuple[RunRecord, Summary]]
"""Conditions and summaries of one benchmark's runs, such as those at several temperatures."""


def readme_block(results: Results) -> str:
    """Return the results block of a README: the table and the conditions of each run."""
    settings = settings_of([run for run, _ in results], [Path() for _ in results])
    return "\n\n".join(
        _run_block(setting, run, summary) for setting, (run, summary) in zip(settings, results, strict=True)
    )


def _run_block(setting: str, run: RunRecord, summary: Summary) -> str:
    heading = [f"**{setting[0].upper()}{setting[1:]}**"] if setting else []
    conditions = f"{conditions_sentence(run, summary)} Intervals are 95%."
    return "\n\n".join([*heading, readme_table(summary), *speeds_that_do_not_count(summary), conditions])


def overview_block(results: Results) -> str:
    """Return one table of several benchmarks and temperatures: main columns, and a sentence for each benchmark."""
    rows: list[list[str]] = []
    notes: list[str] = []
    for run, summary in results:
        for name, policy in summary.policies.items():
            cells = [written(column, policy) for column in OVERVIEW]
            rows.append([f"{run.benchmark}, {run.temperature:g}", name, *cells])
        notes += [
            f"{run.benchmark}: {count(summary.n, 'problem')}, at most {run.max_tokens:,} tokens each, "
            f"concurrency {run.concurrency}, {hardware_in_words(run.hardware)}.",
            *speeds_that_do_not_count(summary),
        ]
    table = markdown_table(["benchmark, temperature", "policy", *(column.title for column in OVERVIEW)], rows)
    return f"{table}\n\n{' '.join(dict.fromkeys(notes))} Intervals are 95%."


def headline(results: Results) -> str:
    """Return the headline of a README: speed and accuracy of `HEADLINED`, with intervals and conditions.

    Raises:
        UsageError: a run lacks one of the policies `HEADLINED`, target and token, or the policy's speed does not count.
            Also if the runs differ in problems, concurrency or hardware.
    """
    run, summary = results[0]
    shared = [(each.data_sha256, each.concurrency, each.hardware, other.n) for each, other in results]
    if any(each != shared[0] for each in shared):
        raise UsageError("A headline of several runs needs the same problems, concurrency and hardware in all of them.")
    found = "; ".join(_at_temperature(*each) for each in results)
    return (
        f"On {count(summary.n, 'problem')} of {run.benchmark} with {_models(run)}: {found} (concurrency "
        f"{run.concurrency}, {hardware_in_words(run.hardware)}; 95% intervals)."
    )


def _models(run: RunRecord) -> str:
    target, draft = (engine.name if engine else "none" for engine in map(run.engines.get, ("target", "draft")))
    pair = target.removesuffix(" target")
    if draft == f"{pair} draft":
        return f"the pair `{pair}`"
    return f"the target {target} and the draft {draft}"


def _policy(run: RunRecord) -> str:
    shipped, record = list_data_files("policies")[HEADLINED].read_text("utf-8"), run.policies.get(HEADLINED)
    if record is None or _settings(record.text) == _settings(shipped):
        return f"the policy `{HEADLINED}`"
    certificate = Policy.model_validate(tomllib.loads(record.text)).at(run.temperature).certificate
    models = {role: engine.weights for role, engine in run.engines.items() if engine is not None}
    if certificate is not None and certificate.models == models:
        return f"the policy `{HEADLINED}` certified for this pair"
    return f"a policy `{HEADLINED}` with other settings than the shipped one"


def _settings(text: str) -> dict[str, Any]:
    """Return the settings in the text of a policy file, without its certificates."""
    table = tomllib.loads(text)
    for each in (table, *table.get("temperatures", ())):
        each.pop("certificate", None)
    return table


def _at_temperature(run: RunRecord, summary: Summary) -> str:
    ours, target = summary.policies.get(HEADLINED), summary.policies.get(BASELINE)
    if ours is None or target is None or ours.speedup_vs_token is None:
        raise UsageError(f"The headline needs a run of the policies target, token and {HEADLINED}.")
    if ours.no_speed is not None:
        raise UsageError(f"The speed of {HEADLINED} does not count and cannot be a headline: {ours.no_speed}.")
    cells = (
        times(ours.speedup_vs_target, ours.speedup_vs_target_ci),
        times(ours.speedup_vs_token, ours.speedup_vs_token_ci),
        percent_with_interval(ours.accuracy, ours.accuracy_ci),
        percent_with_interval(target.accuracy, target.accuracy_ci),
    )
    vs_target, vs_token, accuracy, reference = map(joined, cells)
    return (
        f"at temperature {run.temperature:g} {_policy(run)} is {vs_target} as fast as the target alone and "
        f"{vs_token} as fast as token-level speculation, and answers {accuracy} correctly where the target answers "
        f"{reference}"
    )


def with_block(text: str, kind: str, benchmark: str, block: str) -> str:
    """Return the text with a new block between the markers of this kind and benchmark.

    Raises:
        UsageError: a marker is missing.
    """
    marker, end_marker = f"<!-- {kind}:{benchmark} -->", f"<!-- /{kind} -->"
    before, found, rest = text.partition(marker)
    _, end, after = rest.partition(end_marker)
    if not found or not end:
        raise UsageError(f"The file has no {marker} followed by {end_marker}. Add both where the block belongs.")
    return f"{before}{marker}\n{block}\n{end_marker}{after}"


def with_results(text: str, results: Results) -> str:
    """Return a README with new tables, and with a new headline if it has one."""
    benchmark = results[0][1].benchmark
    text = with_block(text, "results", benchmark, readme_block(results))
    if f"<!-- headline:{benchmark} -->" not in text:
        return text
    return with_block(text, "headline", benchmark, headline(results))


def read_results(folder: Path) -> Results:
    """Load conditions and summaries of finished runs: of the folder itself, or of its direct subfolders.

    Raises:
        UsageError: a folder does not contain both.
    """
    return [(read_run(each), _finished_summary(each)) for each in find_runs(folder)]


def _finished_summary(folder: Path) -> Summary:
    summary = read_summary(folder)
    if summary is None:
        raise UsageError(f"{folder} contains no finished run: summary.json is missing.")
    return summary
