"""Write labelled steps from CHAMP: competition problems with solutions of models, whose first wrong step people marked.

CHAMP (arXiv:2401.06961) is the package `champ-dataset` 1.0.0 on PyPI, under the MIT license. Its data file is read from
the wheel, or from the folder in which the package is installed; nothing of it is imported. Of its 540 annotated
solutions of four models, a fixed seed chooses 150.

    pip download champ-dataset==1.0.0 --no-deps
    python -m evals.bench champ champ_dataset-1.0.0-py3-none-any.whl steps.jsonl
    stepspec judge-bench steps.jsonl --pair qwen

Paragraphs are the steps. The first one that has a part of the marked text is wrong, and those before it are right.
"""

import json
import random
import re
import zipfile
from pathlib import Path
from typing import Annotated, Any

import typer

from stepspec.base.files import file_hash, write_text
from stepspec.chat.prompts import problem_prompt
from stepspec.errors import UsageError
from stepspec.evaluation.judge_bench import LabelledSolution

DATA = "champ_dataset/dataset_files/v0.json"
PROMPT = "boxed"
"""The wording of the questions: that of GSM8K and MATH."""
SEED = 68


def read_data(source: Path) -> dict[str, Any]:
    """Return the data of a wheel, or of a folder with the installed package.

    Raises:
        UsageError: it is not there.
    """
    try:
        if source.is_dir():
            return json.loads((source / DATA).read_bytes())
        with zipfile.ZipFile(source) as wheel:
            return json.loads(wheel.read(DATA))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{source} is not CHAMP, neither its wheel nor a folder with {DATA}.") from error


def labelled(question: str, text: str, start: int | None, source: str) -> LabelledSolution:
    """Return a solution with its labels.

    Args:
        question: the problem.
        text: the solution.
        start: where the first wrong step begins in it; None if no step is wrong.
        source: who wrote it.
    """
    steps = re.findall(r"\s*\S.*?(?:\n\s*\n|\s*\Z)", text, re.DOTALL)
    question = problem_prompt(PROMPT).format(question=question)
    if start is None:
        return LabelledSolution(question=question, steps=steps, labels=[1.0] * len(steps), source=source)
    start += len(text[start:]) - len(text[start:].lstrip())
    num_right = -1 + sum(len("".join(steps[:index])) <= start for index in range(len(steps)))
    return LabelledSolution(question=question, steps=steps, labels=[*[1.0] * num_right, 0.0], source=source)


def solutions_of(data: dict[str, Any]) -> list[LabelledSolution]:
    """Return all annotated solutions, in the order of the data."""
    return [
        labelled(problem["_text"], each["text"], each["start_idx"], f"CHAMP, {name}")
        for problem in data["problems"].values()
        for name, each in problem["fws_annotations"].items()
    ]


def main(
    source: Annotated[Path, typer.Argument(help="The wheel, or a folder in which it is installed.")],
    file: Annotated[Path, typer.Argument(help="File of labelled steps to write.")],
    limit: Annotated[int, typer.Option(min=1, help="Number of solutions, chosen by a fixed seed.")] = 150,
) -> None:
    """Write labelled steps from CHAMP."""
    found = solutions_of(read_data(source))
    chosen = sorted(random.Random(SEED).sample(range(len(found)), min(limit, len(found))))
    write_text(file, "".join(found[index].model_dump_json(exclude_none=True) + "\n" for index in chosen))
    print(f"Wrote {len(chosen)} of {len(found)} solutions to {file}, SHA-256 {file_hash(file)}.")
