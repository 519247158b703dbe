"""Rewrite all generated blocks, plots and stored reports of the documents.

Results come from `evals/results/`, the keys of a policy file from the models in `stepspec.loop.policy` and their
docstrings, and the columns of reports from `stepspec.evaluation.report`.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from pydoc import locate
from typing import Any, NamedTuple

from evals.bench import (
    agent_runs,
    conversation,
    distance,
    engines,
    exactness,
    kinds,
    lab,
    on_vllm,
    overhead,
    reward_head,
    servers,
    speeds,
)
from evals.bench.certification import certification_block
from evals.bench.graders import graders_block
from evals.bench.loads import loads_block
from evals.bench.plots import METHODS, PLOTS, images
from evals.bench.presets import methods_block
from evals.bench.readme import Drafts, accuracy_block, gains_block, headline, overview_block
from evals.bench.results import machine_in_words, read_results, with_block
from evals.bench.service import affinity, concurrency, records
from evals.bench.service.affinity import Affinity
from evals.bench.service.instant import Instant
from evals.bench.speed import EngineSpeeds, speeds_markdown
from stepspec.api.pairs import EMBEDDED_NAME
from stepspec.base.file_model import FileModel
from stepspec.base.files import package_folder
from stepspec.capacity.plan import Sizing
from stepspec.capacity.tables import assumptions, plan_rows, title_of
from stepspec.errors import UsageError
from stepspec.evaluation import judge_bench
from stepspec.evaluation.calibrate.records import Calibrated
from stepspec.evaluation.records import Conditions
from stepspec.evaluation.report import markdown_report
from stepspec.evaluation.report.calibration import path_rows
from stepspec.evaluation.report.cells import UNKNOWN, count, joined, percent_with_interval, times
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.report.figures import COLUMNS, FURTHER
from stepspec.evaluation.report.tables import markdown_table
from stepspec.loop import policy, policy_tables
from stepspec.loop.families import FAMILIES, FamilyTables
from stepspec.loop.judge import Judge, ThresholdJudge, find_judge, shipped_judges

TABLES: Mapping[str, type[FileModel]] = {
    "Top of the file": policy.Policy,
    "`[step]`": policy_tables.StepTable,
    "`[token]`": policy_tables.TokenTable,
    "`[salvage]`": policy_tables.SalvageTable,
    **{f"`[{name}]`": FAMILIES[name].table for name in FamilyTables.model_fields},
    "`[[judges]]` with a threshold": ThresholdJudge,
}
"""Title and model of each table of the keys of a policy file, but for the judges' own settings."""

FORMER_POLICY = re.compile(r"(`)stepspec`|(?:(?<=\| )|(?<=policy )|^)stepspec(?= \||,| on )", re.MULTILINE)
"""The policy `two-level` as results from before version 0.2.0 call it."""


def _judged_in_words(found: judge_bench.JudgeBench) -> str:
    """Return which steps judges were measured on, and with which models."""
    return f"{judge_bench.in_words(found)}; {models_in_words(found.engines)}"


JUDGE_HEADS = ("judge", "steps", "area", "wrong in the best half", "a judgment")


def _judge_rows(found: judge_bench.JudgeBench) -> list[list[str]]:
    return [[row[judge_bench.HEADS.index(head)] for head in JUDGE_HEADS] for row in judge_bench.rows_of(found)]


class Measured(NamedTuple):
    """What a file of a measurement holds: its model, heads and rows of its table, and its conditions."""

    model: type[Conditions]
    heads: Sequence[str]
    rows_of: Callable[[Any], list[list[str]]]
    in_words: Callable[[Any], str]
    has_intervals: bool = True
    shown: Sequence[str] | None = None
    """Heads of the columns that a document shows; None for all."""
    lines_of: Callable[[Any], list[str]] = lambda _: []
    """Sentences below the table."""


MEASURED: Mapping[str, Measured] = {
    "agent": Measured(
        *(agent_runs.Agents, agent_runs.HEADS, agent_runs.rows_of, agent_runs.in_words), lines_of=agent_runs.lines_of
    ),
    "conversation": Measured(
        conversation.Conversations, conversation.HEADS, conversation.rows_of, conversation.in_words
    ),
    "distance": Measured(distance.Distances, distance.SPEEDUP_HEADS, distance.speedup_rows, distance.speedups_in_words),
    "engines": Measured(
        engines.Engines,
        engines.HEADS,
        engines.rows_of,
        engines.in_words,
        has_intervals=False,
        shown=("engine", "weights", "drafted", "tokens/s", "over plain", "accepted", "other texts"),
    ),
    "exact": Measured(exactness.Exactnesses, exactness.HEADS, exactness.rows_of, exactness.in_words),
    "judges": Measured(judge_bench.JudgeBench, JUDGE_HEADS, _judge_rows, _judged_in_words),
    "kinds": Measured(kinds.Kinds, kinds.HEADS, kinds.rows_of, kinds.in_words, has_intervals=False),
    "lab": Measured(lab.Findings, ("temperature", *lab.SHOWN), lab.rows_of, lab.in_words),
    "overhead": Measured(overhead.Overheads, overhead.HEADS, overhead.rows_of, overhead.in_words),
    "reward": Measured(reward_head.RewardHead, reward_head.HEADS, reward_head.rows_of, reward_head.in_words),
    "servers": Measured(
        servers.Servers,
        servers.HEADS,
        servers.rows_of,
        servers.in_words,
        has_intervals=False,
        shown=(
            *("server", "log-probs", "scores", "schema"),
            *(f"{kind}, {number:,}" for kind in ("scored", "asked") for number in servers.CONTEXTS),
        ),
    ),
    "speeds": Measured(speeds.Speeds, speeds.HEADS, speeds.rows_of, speeds.in_words),
    "vllm": Measured(on_vllm.OnVllm, on_vllm.HEADS, on_vllm.rows_of, on_vllm.in_words, shown=on_vllm.SHOWN),
}
"""By the folder under `evals/results`."""
PAGES = {
    "agent": "docs/langchain.md",
    "distance": "docs/many-machines.md",
    "engines": "docs/engines.md",
    "judges": "docs/judges.md",
    "kinds": "docs/thresholds.md",
    "reward": "docs/judges.md",
    "servers": "docs/servers.md",
    "vllm": "docs/servers.md",
}
"""Pages of files of `MEASURED` that are not on the page of the results."""


class Shown(NamedTuple):
    """A page that shows a measurement of the service, with a table that is made of its file."""

    page: str
    model: type[records.Scenario]
    table_of: Callable[[Any], str]


def _hit_rates(found: Affinity) -> str:
    return markdown_table(*affinity.hit_rates(found))


def _speedups(found: concurrency.Concurrency) -> str:
    return _narrow_table(*found.details, ("concurrency", "requests/s", "speedup"))


def _overhead(found: Instant) -> str:
    rows = {row[0]: row for row in records.rows_of(found)}
    shown = [rows[name] for name in ("throughput", "added latency", "memory at the end")]
    return _narrow_table(records.HEADS, shown, records.HEADS[:2])


SCENARIOS: Mapping[str, Shown] = {
    "affinity": Shown("docs/many-machines.md", Affinity, _hit_rates),
    "concurrency": Shown("docs/service.md", concurrency.Concurrency, _speedups),
    "instant": Shown("docs/service.md", Instant, _overhead),
}
"""By the file under `evals/results/service`. Other measurements of the service check limits, and no page shows them."""
SIZING_ROWS = ("agents", "replicas", "GPUs", "p95 latency", "bottleneck")
"""Rows of the table of `stepspec size` that a page shows."""


def generated(root: Path) -> dict[Path, str]:
    """Return the text of each document of a checkout with up-to-date generated blocks, and of each stored report.

    Raises:
        UsageError: a document has no marker for a block, or results are missing.
    """
    results = root / "evals" / "results"
    gsm_mini, drafts = read_results(results / "gsm-mini"), _drafts(root)
    blocks = (
        ("README.md", "gains", "qwen", gains_block(results / "lab" / "qwen.json")),
        ("docs/results.md", "headline", "gsm-mini", headline(gsm_mini)),
        ("docs/results.md", "results", "gsm-mini", overview_block(gsm_mini, drafts)),
        *(
            ("docs/results.md", "accuracy", folder.name, accuracy_block(read_results(folder)))
            for folder in sorted((results / "accuracy").glob("*"))
        ),
        *(("docs/results.md", "methods", name, _methods(root, name)) for name in METHODS),
        ("docs/thresholds.md", "calibrations", "all", calibrations_block(results / "calibration")),
        ("docs/thresholds.md", "certificates", "qwen", certification_block(results / "certification.json")),
        ("docs/results.md", "loads", EMBEDDED_NAME, loads_block(results / "loads" / f"{EMBEDDED_NAME}.json")),
        *(
            (PAGES.get(name, "docs/results.md"), name, file.stem, measured_block(name, file))
            for name in MEASURED
            for file in sorted((results / name).glob("*.json"))
        ),
        *(
            (SCENARIOS[file.stem].page, "load", file.stem, scenario_block(file))
            for file in sorted((results / "service").glob("*.json"))
        ),
        *(
            ("docs/many-machines.md", "size", file.stem, sizing_block(file))
            for file in sorted((results / "sizing").glob("*.json"))
        ),
        ("docs/engines.md", "results", "engine", speeds_block(results / "engine" / "mini.json")),
        ("docs/evaluate.md", "graders", "all", graders_block(results / "graders.json")),
        ("docs/policy-keys.md", "keys", "policy", keys_block()),
        ("docs/metrics.md", "columns", "metrics", columns_block()),
        ("docs/api.md", "names", "api", names_block((root / "docs" / "api.md").read_text("utf-8"))),
    )
    texts: dict[Path, str] = {}
    for name, kind, about, block in blocks:
        file = root / name
        shown = FORMER_POLICY.sub(r"\1two-level\1 (then called \1stepspec\1)", block)
        texts[file] = with_block(texts.get(file) or file.read_text("utf-8"), kind, about, shown)
    reports = {file: read_results(file.parent) for file in results.rglob("report.md")}
    texts |= {file: markdown_report(*each) for file, (each,) in reports.items()}
    made = {(kind, about) for _, kind, about, _ in blocks}
    for file, text in texts.items():
        for kind, about in re.findall(r"<!-- (\w+):([\w-]+) -->", text):
            if (kind, about) not in made:
                raise UsageError(f"{file} has a marker {kind}:{about}, and there are no results for it.")
    return texts


def _drafts(root: Path) -> Drafts:
    """Return the accuracy of the embedded draft alone, from its figures."""
    figures = json.loads((root / "stepspec" / "mini" / "weights" / "figures.json").read_text("utf-8"))["solutions"]
    solved = figures["draft"]["solved"]
    accuracy = joined(percent_with_interval(solved["share"], solved["interval"]))
    return {("gsm-mini", 0.0): f"{accuracy} of {count(figures['problems'], 'problem')}, not run here"}


def _methods(root: Path, name: str) -> str:
    folder = root / "evals" / "results" / "presets" / name
    ((run, summary),) = read_results(folder)
    figures = json.loads((root / "stepspec" / METHODS[name]).read_text("utf-8"))
    return methods_block(folder, run, summary, figures["judging"])


def measured_block(name: str, file: Path) -> str:
    """Return a Markdown table of a file of `MEASURED`, and where it was measured."""
    measured = MEASURED[name]
    found = measured.model.model_validate_json(file.read_text("utf-8"))
    table = _narrow_table(measured.heads, measured.rows_of(found), measured.shown or measured.heads)
    intervals = " Intervals are 95%." if measured.has_intervals else ""
    lines = "\n".join(["\n", *(f"- {line}" for line in measured.lines_of(found))]).rstrip()
    return f"{table}\n\n{measured.in_words(found)}; {machine_in_words(found)}.{intervals}{lines}"


def _narrow_table(heads: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[str]) -> str:
    """Return a Markdown table of some columns."""
    places = [heads.index(head) for head in shown]
    return markdown_table(shown, [[row[place] for place in places] for row in rows])


def calibrations_block(folder: Path) -> str:
    """Return a Markdown table of the calibrations in a folder: of each one the setting that it chose."""
    head = (
        *("pair", "benchmark", "temperature", "result", "thresholds", "problems", "loss at most", "accuracy"),
        *("target's", "speedup", "speedup vs token"),
    )
    rows = [_chosen(Calibrated.model_validate_json(file.read_bytes())) for file in sorted(folder.glob("*.json"))]
    return markdown_table(head, rows)


def _chosen(results: Calibrated) -> Sequence[str]:
    (row,) = (row for row in path_rows(results) if row[0] == results.chosen)
    _, thresholds, _, _, *measured = row
    identity, speed, target = results.identity, results.speed, results.engines["target"]
    return (
        target.name.removesuffix(" target") if target else UNKNOWN,
        identity.benchmark,
        f"{identity.temperature:g}",
        "certified" if results.certified else "not certified",
        thresholds,
        *measured,
        UNKNOWN if speed is None else joined(times(speed.vs_target, speed.vs_target_ci)),
        UNKNOWN if speed is None else joined(times(speed.vs_token, speed.vs_token_ci)),
    )


def speeds_block(file: Path) -> str:
    """Return the table of a file of `python -m evals.bench engine` and its conditions."""
    found = EngineSpeeds.model_validate_json(file.read_text("utf-8"))
    prompt = "prompt" if found.synthetic else "prompt of gsm-mini"
    models = models_in_words({"target": found.engine, "draft": found.draft})
    plan = f"greedy, at most {found.plan.max_tokens} tokens after each {prompt}"
    turns = f"medians of {found.plan.turns} paired turns"
    return f"{speeds_markdown(found)}\n\n{plan}; {turns}; {models}; {machine_in_words(found)}."


def scenario_block(file: Path) -> str:
    """Return a Markdown table of a file of `python -m evals.bench service.NAME`, and where it was measured."""
    shown = SCENARIOS[file.stem]
    found = shown.model.model_validate_json(file.read_text("utf-8"))
    about = found.title
    if isinstance(found, concurrency.Concurrency):
        about = f"{concurrency.in_words(found)}. Intervals are 95%"
    return f"{shown.table_of(found)}\n\n{about}; {machine_in_words(found)}."


def sizing_block(file: Path) -> str:
    """Return the main rows of the table that `stepspec size` printed, and its first assumption, from the file that it
    wrote."""
    found = Sizing.model_validate_json(file.read_text("utf-8"))
    rows = {row[0]: row for row in plan_rows(found)}
    heads, *others = (rows[name] for name in SIZING_ROWS)
    title = title_of(found)
    return f"{markdown_table(heads, others)}\n\n{title[0].upper()}{title[1:]}. {assumptions(found)[0]}"


def keys_block() -> str:
    """Return Markdown tables of every key of a policy file: default and range, and effect.

    The last table has the settings of judges that differ from those of all judges with a threshold.
    """
    parts = [_keys_table(f"## {title}", ("key", "default", "effect"), _keys(model)) for title, model in TABLES.items()]
    common = set(_keys(ThresholdJudge))
    settings = [
        (f"`{kind}`", *key) for kind in shipped_judges() for key in _keys(find_judge(kind)) if key not in common
    ]
    parts.append(_keys_table("## Settings of each judge", ("judge", "key", "default", "effect"), settings))
    return "\n\n".join(parts)


def _keys_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([title, "", lines[0], "|:--" * len(heads) + "|", *lines[1:]])


def _keys(model: type[FileModel]) -> Iterator[tuple[str, str, str]]:
    """Yield name, default with type or range, and effect of each key that is no table."""
    schema: dict[str, Any] = model.model_json_schema()
    effects = field_docs(model)
    for name, about in schema["properties"].items():
        is_table = "$ref" in json.dumps(about) or about.get("items", {}).get("type") == "object"
        if not is_table and not (issubclass(model, Judge) and name == "kind"):
            is_required = name in schema.get("required", ())
            yield f"`{name}`", _default_in_words(about, is_required=is_required), effects[name]


def _default_in_words(about: Mapping[str, Any], *, is_required: bool) -> str:
    """Return the default with the range or the other values; the type of a key without a default."""
    default = about.get("default")
    if default is None:
        return "required, " * is_required + _type_in_words(about)
    written = f"`{json.dumps(default)}`"
    if "anyOf" in about:
        return f"{written} or {about['anyOf'][0]['type']}"
    others = [f"`{json.dumps(value)}`" for value in about.get("enum", ()) if value != default]
    return ", ".join(filter(None, (written, *others, _range_in_words(about))))


def _type_in_words(about: Mapping[str, Any]) -> str:
    if "anyOf" in about:
        return " or ".join(_type_in_words(each) for each in about["anyOf"] if each.get("type") != "null")
    values: Sequence[Any] = about.get("enum", [about["const"]] if "const" in about else [])
    if values:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    return f"{about['type']} {_range_in_words(about)}".strip()


def _range_in_words(about: Mapping[str, Any]) -> str:
    if "minimum" in about and "maximum" in about:
        return f"{about['minimum']:g} to {about['maximum']:g}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {about[key]:g}" for key, sign in signs.items() if key in about)


def field_docs(model: type[FileModel]) -> dict[str, str]:
    """Return the docstring of each field of a class and its bases, joined to one line."""
    found = dict[str, str]()
    for each in reversed([base for base in model.__mro__ if issubclass(base, FileModel) and base is not FamilyTables]):
        (definition,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, after in pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(statement.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def columns_block() -> str:
    """Return a Markdown table of the report columns and their meanings."""
    rows = [f"| {column.title} | {column.meaning} |" for column in (*COLUMNS, *FURTHER)]
    return "\n".join(["| column | meaning |", "|:--|:--|", *rows])


def names_block(page: str) -> str:
    """Return a Markdown table of the names that a page lists, with the first sentence of each docstring."""
    rows: list[str] = []
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        text = " ".join((inspect.getdoc(locate(path)) or "").split())
        rows.append(f"| `{path}` | {re.split('(?<=[.]) ', text, maxsplit=1)[0]} |")
    return "\n".join(["| name | what it is |", "|:--|:--|", *rows])


def main() -> None:
    """Rewrite the generated blocks, plots and stored reports of the checkout that contains this package."""
    root = package_folder().parent
    texts, plots = generated(root), images(root)
    for file, text in (texts | plots).items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    for stale in (root / PLOTS).glob("*.svg"):
        if stale not in plots:
            stale.unlink()
