"""Results of `python -m evals.bench`: the files that it writes, and tables for a terminal and for a README."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from rich import box
from rich.table import Table

from stepspec.evaluation.records import Conditions, EngineRecord, Record

UNKNOWN = "–"
SYNTHETIC = "synthetic: the text is meaningless"


class Contender(Record):
    """One way to continue the same prompts. Figures are medians over turns; ratios are medians of each turn's ratio."""

    name: str
    tokens_per_s: float
    differing: float
    """Share of texts that differ from plain decoding, because rounding decides near ties."""
    over_plain: float
    over_transformers: float
    over_assisted: float | None = None
    """Over transformers' assisted generation at its best setting."""
    over_alone: float | None = None
    """Over plain decoding of one request at a time."""
    acceptance: float | None = None
    """Share of accepted tokens among those verified, up to the first rejected token of each draft."""
    mean_acceptance_length: float | None = None
    """Mean number of tokens that a round with drafted tokens emits."""
    drafting_cost: float | None = None
    """Cost of drafting in a round, in passes of plain decoding."""
    verifying_cost: float | None = None
    """Cost of verifying in a round, in passes of plain decoding."""
    ideal: float | None = None
    """The speedup that acceptance and these costs allow (arXiv:2211.17192, theorem 3.8)."""
    share_of_ideal: float | None = None
    bandwidth_share: float | None = None
    """Bytes that plain decoding must read, over the bytes that the device can copy in the same time."""


class BatchSpeeds(Record):
    """All contenders at one number of concurrent requests."""

    batch: int
    contenders: list[Contender]

    def named(self, name: str) -> Contender | None:
        """Return the contender with this name, or None."""
        return next((each for each in self.contenders if each.name == name), None)


class PlanRecord(Record):
    """Settings of the measurement."""

    drafters: list[str]
    batches: list[int]
    num_drafted: int
    max_tokens: int
    turns: int
    synthetic_acceptance: float | None = None


class EngineSpeeds(Conditions):
    """The file that `python -m evals.bench engine --json` writes."""

    version: Literal[1] = 1
    engine: EngineRecord
    draft: EngineRecord | None = None
    synthetic: bool
    """Whether the weights or the acceptance are random, so that the text is meaningless."""
    plan: PlanRecord
    memory_bytes: dict[str, int]
    draft_overhead: float | None = None
    """Memory of the draft's weights and cache, over the target's."""
    results: list[BatchSpeeds]

    def memory(self) -> str:
        """Return a sentence with the memory of weights and caches."""
        parts = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in self.memory_bytes.items())
        overhead = "" if self.draft_overhead is None else f"; the draft adds {self.draft_overhead:.0%}"
        return f"Memory: {parts}{overhead}."


class ContextCost(Record):
    """Cost of one step at one context length. The target judges, rejects and regenerates the step."""

    context: int
    """Tokens before the step."""
    ms: float
    rest_ms: float
    """Milliseconds of the same steps without attention, the only part that reads the whole context."""
    read_again: float
    """Token ids that the target reads again for a step, although it has read them before."""


class ContextCosts(Conditions):
    """The file that `python -m evals.bench context --json` writes."""

    version: Literal[1] = 1
    engine: EngineRecord
    synthetic: bool
    turns: int = Field(ge=1)
    results: list[ContextCost]


class ControllerCost(Record):
    """Cost of the controller for a step, with engines that answer instantly."""

    context: int
    """Tokens of the prompt."""
    concurrent: int
    steps: int
    """Number of measured steps in all requests."""
    ms: float
    """Milliseconds of the controller's own time for each step."""
    memory_bytes: float
    """Peak memory for each request, including its prompt."""
    transport_ms: float | None = None
    """Milliseconds to encode the prompts of a step's two calls as JSON, not part of `ms`. None if not measured."""
    transport_bytes: float | None = None


class ControllerCosts(Conditions):
    """The file that `python -m evals.bench controller --json` writes."""

    version: Literal[1] = 1
    policy: str
    results: list[ControllerCost]


class ChatCost(Record):
    """Overhead of the LangChain chat model over the controller, with engines that answer instantly."""

    calls: int
    chunks: int
    """Number of chunks in each streamed call."""
    call_ms: float
    chunk_ms: float


class ManyChats(Record):
    """Calls of equal work on one engine, first sequentially and then concurrently."""

    concurrent: int
    median_s: float
    slowest_s: float
    tokens_per_s_alone: float
    tokens_per_s: float


class ChatCosts(Conditions):
    """The file that `python -m evals.bench langchain --json` writes."""

    version: Literal[1] = 1
    policy: str
    target: str
    draft: str
    overhead: ChatCost
    many: ManyChats


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Contender], float | None]
    form: str = ".2f"


COLUMNS: Sequence[_Column] = (
    _Column("tokens/s", lambda each: each.tokens_per_s, ",.0f"),
    _Column("over plain", lambda each: each.over_plain),
    _Column("over transformers", lambda each: each.over_transformers),
    _Column("over assisted", lambda each: each.over_assisted),
    _Column("over 1 request", lambda each: each.over_alone),
    _Column("accepted", lambda each: each.acceptance, ".1%"),
    _Column("tokens a round", lambda each: each.mean_acceptance_length),
    _Column("ideal", lambda each: each.ideal),
    _Column("share of ideal", lambda each: each.share_of_ideal, ".1%"),
    _Column("other texts", lambda each: each.differing or None, ".1%"),
    _Column("bandwidth", lambda each: each.bandwidth_share, ".1%"),
)

SHOWN = frozenset({"tokens/s", "over plain", "over transformers", "over assisted", "accepted"})
"""Titles of the columns that documents show."""


def speeds_table(speeds: BatchSpeeds, synthetic: bool) -> Table:
    """Return a terminal table of all contenders at one number of concurrent requests, without empty columns."""
    columns = [column for column in COLUMNS if any(column.cell(each) is not None for each in speeds.contenders)]
    table = plain_table(f"concurrency {speeds.batch}", synthetic)
    table.add_column("")
    for column in columns:
        table.add_column(column.title, justify="right")
    for each in speeds.contenders:
        table.add_row(each.name, *(_written(column.cell(each), column.form) for column in columns))
    return table


def costs_table(costs: ContextCosts) -> Table:
    """Return a terminal table of step costs by context length."""
    table = plain_table("cost of a step by context length", costs.synthetic)
    for name in ("context", "ms", "without attention", "read again"):
        table.add_column(name, justify="right")
    for each in costs.results:
        table.add_row(f"{each.context:,}", *(f"{value:.1f}" for value in (each.ms, each.rest_ms, each.read_again)))
    return table


def controller_table(costs: ControllerCosts) -> Table:
    """Return a terminal table of the controller's cost for each step."""
    table = plain_table("the controller's share of a step", synthetic=False)
    for name in ("context", "concurrent", "ms", "KiB per request", "transport ms", "transport KiB"):
        table.add_column(name, justify="right")
    for each in costs.results:
        kib = None if each.transport_bytes is None else each.transport_bytes / 1024
        figures = ((each.ms, ".3f"), (each.memory_bytes / 1024, ",.0f"), (each.transport_ms, ".3f"), (kib, ",.1f"))
        cells = (_written(value, form) for value, form in figures)
        table.add_row(f"{each.context:,}", str(each.concurrent), *cells)
    return table


def chat_lines(costs: ChatCosts) -> list[str]:
    """Return sentences about the overhead of the chat model."""
    added, many = costs.overhead, costs.many
    return [
        f"ChatStepSpec adds {added.call_ms:.2f} ms to a call and {added.chunk_ms:.3f} ms to each of {added.chunks} "
        f"chunks (medians of {added.calls} paired turns, with engines that answer instantly).",
        f"{many.concurrent} concurrent calls: {many.tokens_per_s:,.0f} tokens/s, "
        f"{many.tokens_per_s / many.tokens_per_s_alone:.2f} times the {many.tokens_per_s_alone:,.0f} tokens/s of "
        f"sequential calls. The median call took {many.median_s:.2f} s, the slowest {many.slowest_s:.2f} s.",
    ]


def cells_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a terminal table of cells, the first column left-aligned and the others right-aligned."""
    table = plain_table(title, synthetic=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def with_interval(value: float, interval: tuple[float, float] | None) -> str:
    """Return a ratio and its interval for a table."""
    return f"{value:.2f}×" + ("" if interval is None else " [{:.2f}, {:.2f}]".format(*interval))


def plain_table(title: str, synthetic: bool) -> Table:
    """Return an empty table whose title says whether its figures are synthetic."""
    title += f" ({SYNTHETIC})" if synthetic else ""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def speeds_markdown(speeds: EngineSpeeds) -> str:
    """Return a Markdown table of the contenders with one request, and of their speedups with concurrent requests.

    Contenders at a fixed number of drafted tokens, which are there to compute `ideal`, are left out.
    """
    alone, *together = speeds.results
    shown = [each for each in alone.contenders if "(" not in each.name or "best" in each.name]
    columns = [column for column in COLUMNS if column.title in SHOWN]
    columns = [column for column in columns if any(column.cell(each) is not None for each in shown)]
    titles = [*(column.title for column in columns), *(f"over plain, {each.batch} concurrent" for each in together)]
    lines = [f"| {alone.batch} concurrent | {' | '.join(titles)} |", f"| :-- |{' --: |' * len(titles)}"]
    for each in shown:
        cells = [_written(column.cell(each), column.form) for column in columns]
        cells += [
            _written(there and there.over_plain, ".2f") for there in (other.named(each.name) for other in together)
        ]
        lines.append(f"| {each.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _written(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else f"{value:{form}}"
