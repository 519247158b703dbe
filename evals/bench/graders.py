"""Graders of several libraries on the same lists of answers: how many verdicts of each are wrong.

    pip install "lm-eval[math]" inspect-ai
    python -m evals.bench graders --cases cases.jsonl --gsm8k gsm8k/test.jsonl --math math500/test.jsonl \\
        --json evals/results/graders.json

Each library's own functions grade, with their defaults. No model runs. `--cases` has lines with `grader` (`number` or
`math`), `gold`, `text`, `correct` and `arguable`. The other two are the test splits of GSM8K and MATH-500. MATH may not
be redistributed, so only counts are stored. Libraries that are not installed are named in the results.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from evals.bench.results import machine_in_words
from stepspec.cli.output import JsonOption, write_results
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, Record
from stepspec.evaluation.report.tables import markdown_table

Kind = Literal["number", "math"]
KINDS: tuple[Kind, ...] = ("number", "math")
PACKAGES = (
    "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "sympy", "lm-eval", "inspect-ai",
)  # fmt: skip
FORMS = (
    r"The final answer is $\boxed{%s}$.",
    r"\boxed{%s}",
    "The answer is $%s$.",
    "#### %s",
    "Final Answer: The final answer is $%s$. I hope it is correct.",
)
"""Texts in which the answers of MATH-500 are graded. The last is what Minerva's prompt shows."""
WARM_UP = 30
"""Answers that are graded once before the timing, as first calls import and start what is needed."""


class Item(NamedTuple):
    """A text to grade."""

    list_name: str
    gold: str
    text: str
    solution: str
    """The field of the data set from which lm-eval reads the gold answer."""
    is_correct: bool = True
    is_arguable: bool = False


Scorer = Callable[[Item], Mapping[str, bool]]
"""Returns whether a text is correct, by the name of the grader. Some functions return two verdicts."""


class Tally(Record):
    """How a grader judged a list."""

    kind: Kind
    list_name: str
    grader: str
    correct: int
    """Number of answers that are correct, without arguable ones."""
    rejected: int
    """How many of them were not accepted."""
    incorrect: int
    accepted: int
    """How many of the incorrect ones were accepted."""
    arguable: int
    judged_otherwise: int
    """How many of the arguable answers were not judged as the list has them."""
    raised: int
    """How many gradings ended with an exception. They count as not accepted."""
    total_s: float
    longest_s: float


class Graders(Conditions):
    """What `--json` writes."""

    sha256: dict[str, str]
    missing: dict[str, str]
    """Why a library's graders are not among the tallies, by its name."""
    tallies: list[Tally]


@contextmanager
def stepspec(kind: Kind, items: Sequence[Item]) -> Generator[list[Scorer]]:
    """Yield the grader of this package."""
    with Grading(kind) as grading:
        yield [lambda item: {"stepspec grade": grading.grade(item.text, item.gold).status == "correct"}]


@contextmanager
def math_verify(kind: Kind, items: Sequence[Item]) -> Generator[list[Scorer]]:
    """Yield math-verify as its README calls it, which wants formulas in a LaTeX environment."""
    library: Any = import_module("math_verify")

    def score(item: Item) -> Mapping[str, bool]:
        gold = library.parse(f"${item.gold}$" if kind == "math" else item.gold)
        return {"math-verify": library.verify(gold, library.parse(item.text))}

    yield [score]


@contextmanager
def lm_eval(kind: Kind, items: Sequence[Item]) -> Generator[list[Scorer]]:
    """Yield the filters and metrics of lm-eval's tasks, which get the items in place of their data sets."""
    datasets, tasks = import_module("datasets"), import_module("lm_eval.tasks")
    instance: Any = import_module("lm_eval.api.instance").Instance
    names = ["gsm8k"] if kind == "number" else ["minerva_math500", "hendrycks_math500"]
    field, other = ("answer", "question") if kind == "number" else ("solution", "problem")
    solutions = list(dict.fromkeys(item.solution for item in items))
    rows = datasets.Dataset.from_list([{field: each, other: ""} for each in solutions])

    def splits(**_: Any) -> Mapping[str, Any]:
        return {"train": rows, "test": rows}

    changed = [{"task": name, "custom_dataset": splits} for name in names]
    loaded = tasks.TaskManager().load([{"group": "graders", "task": changed}])["tasks"]

    def scorer(name: str) -> Scorer:
        task = loaded[name]
        docs = dict(zip(solutions, task.test_docs(), strict=True))

        def score(item: Item) -> Mapping[str, bool]:
            found: dict[str, bool] = {}
            answer = instance("generate_until", docs[item.solution], ("",), 0, resps=[item.text])
            for each in task._filters:
                each.apply([answer])
                metrics = task.process_results(docs[item.solution], [answer.filtered_resps[each.name]])
                for metric, value in metrics.items():
                    found[f"lm-eval {name} {metric if each.name == 'none' else each.name}"] = bool(value)
            return found

        return score

    yield [scorer(name) for name in names]


@contextmanager
def inspect_ai(kind: Kind, items: Sequence[Item]) -> Generator[list[Scorer]]:
    """Yield Inspect's scorer for the kind: `match(numeric=True)` or `math()`."""
    scorers, solver, model = (import_module(f"inspect_ai.{name}") for name in ("scorer", "solver", "model"))
    name, scorer = ("match", scorers.match(numeric=True)) if kind == "number" else ("math", scorers.math())
    with asyncio.Runner() as runner:  # one loop, as `math` starts a thread for each

        def score(item: Item) -> Mapping[str, bool]:
            output = model.ModelOutput.from_content("none", item.text)
            state = solver.TaskState(model.ModelName("none/none"), 0, 1, "", [], output=output)
            found = runner.run(scorer(state, scorers.Target(item.gold)))
            return {f"Inspect {name}": found.value == scorers.CORRECT}

        yield [score]


LIBRARIES: Mapping[str, Callable[[Kind, Sequence[Item]], AbstractContextManager[list[Scorer]]]] = {
    "stepspec": stepspec,
    "math-verify": math_verify,
    "lm-eval": lm_eval,
    "inspect-ai": inspect_ai,
}


def read_lists(cases: Path | None, gsm8k: Path | None, math: Path | None) -> dict[Kind, list[Item]]:
    """Return the items of the files, by the kind of grader that they are for."""
    found: dict[Kind, list[Item]] = {kind: [] for kind in KINDS}
    for row in _rows(cases):
        solution = row["gold"] if row["grader"] == "number" else rf"\boxed{{{row['gold']}}}"
        item = Item("cases", row["gold"], row["text"], solution, row["correct"], row["arguable"])
        found[row["grader"]].append(item)
    for row in _rows(gsm8k):
        gold = row["answer"].rpartition("####")[2].strip()
        found["number"].append(Item("GSM8K, solutions", gold, row["answer"], row["answer"]))
    for row in _rows(math):
        texts = {f"MATH-500, `{form % 'A'}`": form % row["answer"] for form in FORMS}
        texts["MATH-500, solutions"] = row["solution"]
        found["math"] += [Item(name, row["answer"], text, row["solution"]) for name, text in texts.items()]
    return found


def _rows(file: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file else []


class Graded(NamedTuple):
    """What the graders of one scorer say of a text, and the seconds that they took."""

    item: Item
    verdicts: Mapping[str, bool] | None
    """None if the library raised."""
    seconds: float


def grade(item: Item, scorer: Scorer) -> Graded:
    """Grade a text. Libraries may raise anything."""
    start = time.perf_counter()
    try:
        verdicts = scorer(item)
    except Exception:
        verdicts = None
    return Graded(item, verdicts, time.perf_counter() - start)


def tallies(kind: Kind, items: Sequence[Item], scorer: Scorer) -> list[Tally]:
    """Return how the graders of a scorer judge each list."""
    for item in items[:WARM_UP]:
        grade(item, scorer)
    lists: dict[str, list[Graded]] = {}
    for item in items:
        lists.setdefault(item.list_name, []).append(grade(item, scorer))
    names = dict.fromkeys(name for found in lists.values() for each in found for name in each.verdicts or ())
    assert names, "a library raised for every text"
    return [tally(kind, list_name, name, found) for name in names for list_name, found in lists.items()]


def tally(kind: Kind, list_name: str, grader: str, graded: Sequence[Graded]) -> Tally:
    """Count the verdicts of a grader on a list."""
    wrong = {(correct, arguable): [0, 0] for correct in (True, False) for arguable in (True, False)}
    for item, verdicts, _ in graded:
        counts = wrong[item.is_correct, item.is_arguable]
        counts[0] += 1
        counts[1] += (verdicts or {}).get(grader, False) != item.is_correct
    (correct, rejected), (incorrect, accepted) = wrong[True, False], wrong[False, False]
    return Tally(
        kind=kind,
        list_name=list_name,
        grader=grader,
        correct=correct,
        rejected=rejected,
        incorrect=incorrect,
        accepted=accepted,
        arguable=wrong[True, True][0] + wrong[False, True][0],
        judged_otherwise=wrong[True, True][1] + wrong[False, True][1],
        raised=sum(each.verdicts is None for each in graded),
        total_s=round(sum(each.seconds for each in graded), 3),
        longest_s=round(max(each.seconds for each in graded), 3),
    )


def graders_block(file: Path) -> str:
    """Return the Markdown tables of the documents from what `--json` wrote: all lists but the forms of an answer."""
    found = Graders.model_validate_json(file.read_text("utf-8"))
    tallies = tuple(each for each in found.tallies if "`" not in each.list_name)
    return graders_tables(found.model_copy(update={"tallies": tallies}))


def graders_tables(found: Graders) -> str:
    """Return Markdown tables of wrong verdicts and times by grader."""
    tables = [_table(own) for kind in KINDS if (own := [each for each in found.tallies if each.kind == kind])]
    missing = f" Not installed: {', '.join(found.missing)}." if found.missing else ""
    return "\n\n".join([*tables, f"One text after the other; {machine_in_words(found)}.{missing}"])


def _table(found: Sequence[Tally]) -> str:
    graders = {each.grader: dict[str, str]() for each in found}
    for each in found:
        name, cells = each.list_name, graders[each.grader]
        for title, number, of in (
            ("accepted, of {} incorrect", each.accepted, each.incorrect),
            ("rejected, of {} correct", each.rejected, each.correct),
            ("judged otherwise, of {} arguable", each.judged_otherwise, each.arguable),
        ):
            if of:
                cells[f"{name}: {title.format(f'{of:,}')}"] = f"{number:,}"
    for name, cells in graders.items():
        own = [each for each in found if each.grader == name]
        texts = sum(each.correct + each.incorrect + each.arguable for each in own)
        if any(each.raised for each in found):
            cells["exceptions"] = f"{sum(each.raised for each in own):,}"
        cells["ms a text"] = f"{1e3 * sum(each.total_s for each in own) / texts:.2f}"
    titles = next(iter(graders.values()))
    return markdown_table(["", *graders], [[title, *(cells[title] for cells in graders.values())] for title in titles])


def main(
    cases: Annotated[Path | None, typer.Option(help="A jsonl file of answers with verdicts.")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="The test split of GSM8K, as jsonl.")] = None,
    math: Annotated[Path | None, typer.Option(help="The test split of MATH-500, as jsonl.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare graders on the same lists of answers."""
    files = {"cases": cases, "gsm8k": gsm8k, "math": math}
    about = conditions()
    about["versions"] |= {name: found for name in PACKAGES if (found := _version(name))}
    missing, found = dict[str, str](), list[Tally]()
    for kind, items in read_lists(**files).items():
        for name, library in LIBRARIES.items() if items else ():
            with ExitStack() as stack:
                try:
                    scorers = stack.enter_context(library(kind, items))
                except (ImportError, AssertionError) as error:  # lm-eval asserts the version of its parser
                    missing[name] = str(error)
                    print(f"{name} does not grade: {error}", file=sys.stderr)
                    continue
                for scorer in scorers:
                    found += tallies(kind, items, scorer)
    hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file}
    record = Graders(**about, sha256=hashes, missing=missing, tallies=found)
    print(graders_tables(record))
    write_results(record, json_file)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
