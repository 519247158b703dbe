"""The schema of a benchmark file: where its problems are, how they are worded and how answers are graded.

`stepspec.evaluation.run.problems` reads the problems.
"""

from typing import Annotated, Literal

from pydantic import Field, Strict, StringConstraints, field_validator

from stepspec.base.file_model import FileModel, Version
from stepspec.chat.prompts import PROBLEM_PROMPTS, problem_prompt, prompt_version
from stepspec.errors import unknown_name

GraderKind = Literal["integer", "number", "math"]
AnswerFrom = Literal["whole", "hashes", "boxed"]
"""Where the gold answer is in its column.

`whole`: the whole text. `hashes`: after the last `#### `, as in GSM8K (arXiv:2110.14168), or the whole text if there is
none. `boxed`: in the last box, as in MATH (arXiv:2103.03874)."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SamplingTable(FileModel):
    """Default sampling parameters of a benchmark."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Shot(FileModel):
    """A solved example that precedes every question."""

    question: str
    answer: str


class ColumnsTable(FileModel):
    """Column names of the data. `id`, `level` and `subject` are optional in a row unless they are named here."""

    question: str = "question"
    answer: str = "answer"
    id: str | None = None
    level: str | None = None
    """The difficulty: `3`, `"3"` or `"Level 3"`. Any other value counts as unknown."""
    subject: str | None = None


Split = Literal["test", "calibration", "train"]


class ShippedData(FileModel):
    """A split in a file that ships with stepspec, in `evals/data`."""

    kind: Literal["gsm-mini"]
    split: Split = "test"


class RowsTable(FileModel):
    """How to read rows of data, and what to check them against."""

    rows: int | None = Field(default=None, ge=1)
    sha256: Sha256 | None = None
    """Content hash of the whole split, see `stepspec.evaluation.run.data.content_line`; None if unknown."""
    answer_from: AnswerFrom = "whole"
    skip_unanswered: bool = False
    """Skip rows without an answer instead of rejecting the data."""
    columns: ColumnsTable = ColumnsTable()


class HubFile(FileModel):
    """A file of a dataset and the hash of its bytes, if known."""

    path: str
    sha256: Sha256 | None = None


class HubData(RowsTable):
    """A split of a dataset on the Hugging Face hub at one commit."""

    kind: Literal["hub"]
    repository: str
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    """A full commit hash, because branches and tags can move."""
    split: str = "test"
    copy_path: str | None = None
    """Path of a copy of the split in one file, relative to the folder of the benchmark file. If it exists, it is read
    instead of the hub. A checkout contains some of these copies."""
    files: Annotated[tuple[HubFile, ...], Strict(False)] = Field(min_length=1)


class FileData(RowsTable):
    """A user's file, next to the benchmark file or given with `--data`."""

    kind: Literal["file"]
    path: str | None = None
    """Relative to the folder of the benchmark file."""


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
    """Whether the last number of the text is the answer if no known answer format is found."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum number of committed tokens per problem, thinking and answer together."""
    default_limit: int | None = Field(default=None, ge=1)
    """Number of problems if `--limit` is not given; None means all."""
    default_repeats: int = Field(default=1, ge=1)
    """Number of repeats per problem, unless the command line sets it."""
    data: Annotated[ShippedData | HubData | FileData, Field(discriminator="kind")]
    sampling: SamplingTable = SamplingTable()
    shots: Annotated[tuple[Shot, ...], Strict(False)] = ()

    @field_validator("prompt")
    @classmethod
    def _known_prompt(cls, id: str) -> str:
        if id not in PROBLEM_PROMPTS:
            raise ValueError(unknown_name("problem prompt", id, PROBLEM_PROMPTS))
        return id


def asked(benchmark: Benchmark, question: str) -> str:
    """Return the full request text: the shots with their answers, then the question, each in the prompt's wording.

    >>> asked(benchmark, "How many legs has a cow?")  # prompt = "qa" and one shot
    'Q: How many legs has a hen?\\nA: Two.\\n\\nQ: How many legs has a cow?\\nA:'
    """
    return _shots(benchmark) + problem_prompt(benchmark.prompt).format(question=question)


def wording_version(benchmark: Benchmark) -> str:
    """Return a short content hash of the wording and its shots. Without shots it is `prompt_version` of the wording."""
    return prompt_version(_shots(benchmark) + problem_prompt(benchmark.prompt))


def _shots(benchmark: Benchmark) -> str:
    wording = problem_prompt(benchmark.prompt)
    gap = " " if wording.endswith(":") else "\n\n"
    return "".join(f"{wording.format(question=shot.question)}{gap}{shot.answer}\n\n" for shot in benchmark.shots)
