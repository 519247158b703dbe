"""The figures of a policy: title, meaning and format of each in every table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from stepspec.evaluation.records import Percentiles, PolicySummary, Summary
from stepspec.evaluation.report import cells
from stepspec.evaluation.report.cells import UNKNOWN, Cell


@dataclass(frozen=True)
class FigureFormat:
    """How tables write a figure, and the names of its numbers in a CSV file, in which {} is its title."""

    cell: Callable[[Any], Cell] | Callable[[Any, Any], Cell]
    names: Sequence[str] = ("{}",)


WITH_INTERVAL = ("{}", "{} low", "{} high")
SHARE = FigureFormat(cells.percent_with_interval, WITH_INTERVAL)
GAIN = FigureFormat(partial(cells.percent_with_interval, sign="+"), WITH_INTERVAL)
PERCENT = FigureFormat(lambda share: (cells.percent(share), ""))
RATIO = FigureFormat(cells.times, WITH_INTERVAL)
NUMBER = FigureFormat(cells.number)
SIGNIFICANT = FigureFormat(lambda number: (cells.significant(number), ""))
PERCENTILES = FigureFormat(cells.percentiles, ("{} p50", "{} p90", "{} p99"))
OF_ROWS = FigureFormat(lambda part, rows: (f"{part:,} of {rows:,}", ""))


@dataclass(frozen=True)
class Column:
    """One figure of a policy, with its title, meaning and format."""

    title: str
    meaning: str
    value: Callable[[PolicySummary], tuple[Any, ...]]
    """Returns the arguments of `form`."""
    form: FigureFormat
    is_speed: bool = False

    def cell(self, policy: PolicySummary) -> Cell:
        """Return the figure as tables write it: a dash for a speed that does not count."""
        return (UNKNOWN, "") if self.is_speed and policy.no_speed else self.form.cell(*self.value(policy))

    def numbers(self, policy: PolicySummary) -> dict[str, object]:
        """Return the numbers of the figure by their names in a CSV file; None if unknown."""
        found = list[Any]()
        for value in () if self.is_speed and policy.no_speed else self.value(policy):
            parts = [*value.model_dump().values()] if isinstance(value, Percentiles) else value
            found += parts if isinstance(parts, list | tuple) else [parts]
        return dict(zip_longest((name.format(self.title) for name in self.form.names), found[: len(self.form.names)]))


@dataclass(frozen=True)
class Extra:
    """A figure that is not in the summary, such as the cost at given prices, with a cell for each policy."""

    title: str
    meaning: str
    cells: Mapping[str, Cell]
    numbers: Mapping[str, float]
    """The known figures by policy."""


ACCURACY = Column(
    "accuracy",
    "share of problems answered correctly; failed requests are not correct",
    lambda each: (each.accuracy, each.accuracy_ci),
    SHARE,
)
STRICT_ACCURACY = Column(
    "accuracy (strict)",
    "accuracy in the strict reading; all other figures are in the flexible one",
    lambda each: (each.strict_accuracy, each.strict_accuracy_ci),
    SHARE,
)
ACCURACY_GAIN = Column(
    "accuracy gain",
    "accuracy minus the target's on the same problems, in points",
    lambda each: (each.accuracy_delta, each.accuracy_delta_ci),
    GAIN,
)
LOST_AND_WON = Column(
    "lost, won",
    "problems that only the target, and only the policy, answered correctly; with repeats, means",
    lambda each: (each.lost, each.won),
    FigureFormat(lambda lost, won: (UNKNOWN if lost is None else f"{lost:g}, {won:g}", ""), ("lost", "won")),
)
ACCURACY_KEPT = Column(
    "accuracy kept",
    "exact, or the loss is at most one point, at 95% for all policies together",
    lambda each: (each.accuracy_kept,),
    FigureFormat(lambda words: (words or UNKNOWN, "")),
)
SPEEDUP = Column(
    "speedup",
    "wall time of the target over the policy's, on the same problems",
    lambda each: (each.speedup_vs_target, each.speedup_vs_target_ci),
    RATIO,
    is_speed=True,
)
SPEEDUP_VS_TOKEN = Column(
    "speedup vs token",
    "wall time of token-level speculation over the policy's",
    lambda each: (each.speedup_vs_token, each.speedup_vs_token_ci),
    RATIO,
    is_speed=True,
)
STEPS_PROPOSED = Column(
    "steps proposed",
    "steps that the draft proposed, of all steps",
    lambda each: (each.steps_proposed, each.steps),
    FigureFormat(
        lambda proposed, steps: (UNKNOWN, "") if proposed is None else (f"{proposed:,}", f"({steps or 0:,} in all)"),
        ("{}", "steps"),
    ),
)
STEPS_ACCEPTED = Column(
    "steps accepted",
    "share of judged steps that were accepted",
    lambda each: (each.step_acceptance, each.step_acceptance_ci),
    SHARE,
)
TOKENS_ACCEPTED = Column(
    "tokens accepted",
    "share of drafted tokens that were accepted",
    lambda each: (each.token_acceptance, each.token_level_exact),
    FigureFormat(lambda share, exact: (cells.percent(share), "" if exact else "(not exact)")),
)
TOKENS_RELAXED = Column(
    "tokens relaxed",
    "share of committed tokens that are relaxed",
    lambda each: (each.relaxed_share,),
    PERCENT,
)
TOKENS_PER_PASS = Column(
    "tokens per pass",
    "committed tokens per pass of the target",
    lambda each: (each.tokens_per_target_pass,),
    NUMBER,
)
LENGTH = Column(
    "length",
    "committed tokens over the target's; shorter texts alone make a policy faster",
    lambda each: (each.length_ratio,),
    RATIO,
)
JUDGING = Column(
    "judging",
    "share of the wall time in judges and controller",
    lambda each: (each.judge_controller_share,),
    PERCENT,
)

COLUMNS: Sequence[Column] = (
    ACCURACY,
    ACCURACY_GAIN,
    LOST_AND_WON,
    ACCURACY_KEPT,
    SPEEDUP,
    SPEEDUP_VS_TOKEN,
    STEPS_ACCEPTED,
    TOKENS_ACCEPTED,
    TOKENS_PER_PASS,
    LENGTH,
    JUDGING,
)
"""The columns of a README table."""

ACCURACY_WITHOUT_FAILED = Column(
    "accuracy without failed",
    "accuracy of the requests that did not fail",
    lambda each: (each.accuracy_without_failed, each.accuracy_without_failed_ci) if each.failed else (None, None),
    SHARE,
)
P_VALUE = Column(
    "p",
    "p-value of the accuracy gain: McNemar's exact test, or with repeats a permutation test",
    lambda each: (each.accuracy_p,),
    FigureFormat(lambda p: (cells.probability(p), "")),
)
LOSS_BOUND = Column(
    "accuracy lost, at most",
    "one-sided 95% upper bound of the loss, in points; below zero it is a gain",
    lambda each: (each.accuracy_loss_upper95,),
    FigureFormat(lambda share: (cells.percent(share, sign="+"), "")),
)
SPEEDUP_MEDIAN = Column(
    "speedup, median",
    "median over problems; long problems do not dominate it",
    lambda each: (each.speedup_median, each.speedup_median_ci),
    RATIO,
    is_speed=True,
)
LENGTH_WITH_INTERVAL = Column(
    "length",
    "committed tokens over the target's; shorter texts alone make a policy faster",
    lambda each: (each.length_ratio, each.length_ratio_ci),
    RATIO,
)
TOKENS_PER_S_RATIO = Column(
    "tokens/s",
    "tokens per second over the target's; the speedup is this over the length",
    lambda each: (each.tokens_per_s_ratio, each.tokens_per_s_ratio_ci),
    RATIO,
)
LATENCY = Column(
    "latency",
    "seconds of a request with waiting; median, 90th and 99th percentile",
    lambda each: (each.latency_s,),
    PERCENTILES,
)
FIRST_THOUGHT = Column(
    "to the first thought",
    "seconds until the first step is committed",
    lambda each: (each.first_step_s,),
    PERCENTILES,
)
FIRST_ANSWER = Column(
    "to the first answer",
    "seconds until the first chunk of the answer",
    lambda each: (each.first_answer_s,),
    PERCENTILES,
)
LONGEST_GAP = Column(
    "longest gap",
    "longest time between two steps or chunks of the answer",
    lambda each: (each.longest_gap_s,),
    PERCENTILES,
)
PROBLEMS_PER_S = Column(
    "problems/s",
    "problems per second at the run's concurrency",
    lambda each: (each.throughput and each.throughput.problems_per_s,),
    SIGNIFICANT,
    is_speed=True,
)
TOKENS_PER_S = Column(
    "committed tokens/s",
    "tokens per second of all requests together",
    lambda each: (each.throughput and each.throughput.tokens_per_s,),
    SIGNIFICANT,
)
THROUGHPUT_RATIO = Column(
    "throughput",
    "problems per second over the target's",
    lambda each: (
        (each.throughput.speedup_vs_target, each.throughput.speedup_vs_target_ci) if each.throughput else (None, None)
    ),
    RATIO,
    is_speed=True,
)
TRUNCATED = Column(
    "truncated", "answers cut off by the token limit", lambda each: (each.truncated, num_rows(each)), OF_ROWS
)
NO_ANSWER = Column(
    "no answer", "texts in which no answer was found", lambda each: (each.no_answer, num_rows(each)), OF_ROWS
)
NOT_READ = Column(
    "not read",
    "answers that the grader could not read; not correct",
    lambda each: (each.parse_errors + each.timeouts, num_rows(each)),
    OF_ROWS,
)
FAILED = Column(
    "failed",
    "requests that ended in an error; not correct",
    lambda each: (each.failed,),
    FigureFormat(lambda number: (f"{number:,}", "")),
)


def num_rows(policy: PolicySummary) -> int:
    """Return the number of rows, problems times repeats. Summaries from before repeats existed do not store it."""
    return policy.n if policy.num_rows is None else policy.num_rows


CLOSING: Sequence[Column] = (ACCURACY, STRICT_ACCURACY, *COLUMNS[1:], STEPS_PROPOSED, TRUNCATED, NO_ANSWER)
"""The columns of every terminal table. Texts that are cut off or have no answer make a speed meaningless."""

GROUPS: Mapping[str, Sequence[Column]] = {
    "Accuracy": (
        ACCURACY,
        STRICT_ACCURACY,
        ACCURACY_GAIN,
        LOST_AND_WON,
        ACCURACY_KEPT,
        P_VALUE,
        LOSS_BOUND,
        ACCURACY_WITHOUT_FAILED,
    ),
    "Speed": (SPEEDUP, SPEEDUP_MEDIAN, SPEEDUP_VS_TOKEN, TOKENS_PER_S_RATIO, LENGTH_WITH_INTERVAL),
    "Speculation": (STEPS_PROPOSED, STEPS_ACCEPTED, TOKENS_ACCEPTED, TOKENS_RELAXED, TOKENS_PER_PASS, JUDGING),
    "Latency": (LATENCY, FIRST_THOUGHT, FIRST_ANSWER, LONGEST_GAP),
    "Throughput": (PROBLEMS_PER_S, TOKENS_PER_S, THROUGHPUT_RATIO),
    "Trouble": (TRUNCATED, NO_ANSWER, NOT_READ, FAILED),
}
"""All columns by group."""

_IN_COLUMNS = {column.title for column in COLUMNS}
FURTHER: Sequence[Column] = [
    column for columns in GROUPS.values() for column in columns if column.title not in _IN_COLUMNS
]
"""The columns that are not in `COLUMNS`."""


AT_K: Mapping[str, str] = {
    "pass": "probability that at least one of {} samples of a problem is correct",
    "maj": "probability that the most frequent answer of {} samples of a problem is correct; ties count in parts",
    "avg": "share of correct samples, of {} for each problem",
}
"""Meanings of the figures of repeats. Each is the mean over problems, by the reading of the accuracy."""


def repeat_columns(summary: Summary) -> list[Column]:
    """Return a column for each figure of repeats; empty without repeats."""
    titles = dict.fromkeys(title for policy in summary.policies.values() for title in policy.at_k)
    return [
        Column(title, AT_K[title.partition("@")[0]].format(title.partition("@")[2]), _at_k(title), SHARE)
        for title in titles
    ]


def _at_k(title: str) -> Callable[[PolicySummary], tuple[Any, ...]]:
    def value(policy: PolicySummary) -> tuple[Any, ...]:
        found = policy.at_k.get(title)
        return found and found.value, found and found.ci

    return value


def named(columns: Iterable[Column], summary: Summary) -> list[Column]:
    """Return the columns as a table of the summary shows them: with the reading in the title of the accuracy, and
    without the strict one where it is the only one."""
    return [
        replace(column, title=summary.named(column.title)) if column is ACCURACY else column
        for column in columns
        if column is not STRICT_ACCURACY or is_known(column, summary.policies)
    ]


def is_known(column: Column, policies: Mapping[str, PolicySummary]) -> bool:
    """Return whether at least one policy has a value other than unknown and zero."""
    written = [column.cell(policy)[0] for policy in policies.values()]
    return any(text != UNKNOWN and not (text == "0" or text.startswith("0 of ")) for text in written)
