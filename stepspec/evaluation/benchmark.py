"""What a benchmark file says, ours or a user's: where its problems are, how they are put and how they are graded.

Reads no problems; `stepspec.evaluation.running.problems` does.
"""

from typing import Annotated, Literal

from pydantic import Field, Strict, StringConstraints, field_validator

from stepspec.chat.prompts import PROBLEM_PROMPTS, problem_prompt, prompt_version
from stepspec.errors import unknown_name
from stepspec.loop.policy import FileModel, Version

GraderKind = Literal["integer", "number", "math"]
AnswerFrom = Literal["whole", "hashes", "boxed"]
"""Where the gold answer stands in its column: it is the whole text; it follows the last `#### ` (or is the whole text
if there is none), as in GSM8K (arXiv:2110.14168); it is in the last box, as in MATH (arXiv:2103.03874)."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SamplingTable(FileModel):
    """How a benchmark is sampled unless the command line says otherwise."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Shot(FileModel):
    """A solved example that is put in front of every question."""

    question: str
    answer: str


class ColumnsTable(FileModel):
    """What the columns of the data are called. A row need not have the last three unless they are named here."""

    question: str = "question"
    answer: str = "answer"
    id: str | None = None
    level: str | None = None
    """How hard a problem is: `3`, `"3"` or `"Level 3"`; with anything else that is not known."""
    subject: str | None = None


class DrawnData(FileModel):
    """Problems that a generator of `stepspec.evaluation.generators` draws."""

    kind: Literal["gsm-mini", "gsm-plain"]
    split: str = "test"


class RowsTable(FileModel):
    """What data in rows are checked against, and how a row is read."""

    rows: int | None = Field(default=None, ge=1)
    sha256: Sha256 | None = None
    """Of the whole split by `stepspec.evaluation.running.data.content_line`; None if it is not known."""
    answer_from: AnswerFrom = "whole"
    skip_unanswered: bool = False
    """Leave out rows without an answer, instead of refusing the data."""
    columns: ColumnsTable = ColumnsTable()


class HubFile(FileModel):
    """A file of a dataset, with the hash of its bytes where that is known."""

    path: str
    sha256: Sha256 | None = None


class HubData(RowsTable):
    """A split of a dataset on the Hugging Face hub at one commit."""

    kind: Literal["hub"]
    repository: str
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    """A whole commit hash: a branch or a tag may move."""
    split: str = "test"
    copy_path: str | None = None
    """The split in one file, as a path from the folder of the benchmark's file. Where it exists, it is read and the hub
    is not asked; a checkout has some."""
    files: Annotated[tuple[HubFile, ...], Strict(False)] = Field(min_length=1)


class FileData(RowsTable):
    """A file of the user's, beside the benchmark or given with `--data`."""

    kind: Literal["file"]
    path: str | None = None
    """Seen from the folder of the benchmark's file."""


class Benchmark(FileModel):
    """One benchmark file."""

    version: Version
    title: str
    summary: str
    paper: str | None = None
    prompt: str = "bare"
    """A name in `stepspec.chat.prompts.PROBLEM_PROMPTS`."""
    grader: GraderKind = "integer"
    last_number: bool = False
    """Whether an answer that is given in no known form is taken from the last number of the text."""
    max_tokens: int = Field(default=1024, ge=1)
    """Most committed tokens per problem, thinking and answer together."""
    default_limit: int | None = Field(default=None, ge=1)
    """How many problems are taken unless `--limit` says otherwise; None is all."""
    default_repeats: int = Field(default=1, ge=1)
    """How often each problem is asked unless the command line says otherwise."""
    data: Annotated[DrawnData | HubData | FileData, Field(discriminator="kind")]
    sampling: SamplingTable = SamplingTable()
    shots: Annotated[tuple[Shot, ...], Strict(False)] = ()

    @field_validator("prompt")
    @classmethod
    def _known_prompt(cls, id: str) -> str:
        if id not in PROBLEM_PROMPTS:
            raise ValueError(unknown_name("problem prompt", id, PROBLEM_PROMPTS))
        return id


def asked(benchmark: Benchmark, question: str) -> str:
    """The whole turn that a question is asked in: the shots, each in the wording with its answer, and the question.

    >>> asked(benchmark, "How many legs has a cow?")  # prompt = "qa" and one shot
    'Q: How many legs has a hen?\\nA: Two.\\n\\nQ: How many legs has a cow?\\nA:'
    """
    return _shots(benchmark) + problem_prompt(benchmark.prompt).format(question=question)


def wording_version(benchmark: Benchmark) -> str:
    """Short content hash of the wording and its shots; without shots it is `prompt_version` of the wording."""
    return prompt_version(_shots(benchmark) + problem_prompt(benchmark.prompt))


def _shots(benchmark: Benchmark) -> str:
    wording = problem_prompt(benchmark.prompt)
    gap = " " if wording.endswith(":") else "\n\n"
    return "".join(f"{wording.format(question=shot.question)}{gap}{shot.answer}\n\n" for shot in benchmark.shots)
