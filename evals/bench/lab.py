"""Try rules that accept drafted tokens before they are built: what they keep, what they lose, how fast they could be.

Target and draft read the same texts in lockstep, one token each in a pass over a batch, with a text for each problem
under each setting of `lab.toml`. Both distributions are known at every position, so a rule decides as in speculative
decoding with K drafted tokens. No time is measured: the report derives speeds from the rounds. It does so for other K
than the setting's too, because a text depends on K only by the tokens behind full rounds. The step that answers is
written again exactly if it has relaxed tokens, and nothing behind it is relaxed, as under the policy `relaxed`. The
speeds have what that takes; the texts, and so the losses, are those before it.

    python -m evals.bench lab --rows FILE --data train.jsonl --skip 1000 --settings target,ratio-0.1-digits
    python -m evals.bench lab --report FILE

`--rows` appends to its file, and continues what was interrupted. The file is for one pair and one set of problems.
"""

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from pydantic import Field, Strict
from rich.table import Table
from torch import Tensor

from evals.bench.rows import finished_rows, stored_rows
from evals.bench.speed import UNKNOWN, cells_table
from stepspec.api.pairs import QWEN_NAME, find_pair
from stepspec.base.file_model import FileModel, Version, load_toml
from stepspec.chat.prompts import encode_request
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.engines.torch_engine.attention import BLOCK
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.sampling import draw, residual
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.benchmark import FileData, asked
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import BASELINE, Conditions, Record
from stepspec.evaluation.run import load_benchmark, load_problems
from stepspec.evaluation.run.problem_reader import EvalProblem
from stepspec.evaluation.stats import Paired
from stepspec.loop.thinking import marks_answer

COSTS = (0.06, 0.0), (0.1, 0.0), (0.2, 0.0), (0.26, 0.065), (0.5, 0.06)
"""Costs of a drafted token (c) and of a further verified row (r), in passes of the target over one token: three GPUs,
and two CPU cores with an int8 target and its draft in int4, and both in bfloat16."""
DRAFTED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
ACCEPTED, RELAXED, REFUSED, REWRITTEN = "arxw"
"""Letters of a trace. A capital is what would have become of the token behind a full round, which the target writes."""
TOGETHER = 32
"""Rows of logits that are compared together. The memory of larger tensors goes back to the system each time, and
getting it again takes as long as the work."""
KINDS = {
    "digits": re.compile(r"\d"),
    "operators": re.compile(r"[-+*/=<>^%×÷]|\b(?:times|div|frac|cdot)\b"),
    "names": re.compile(r"\b[A-Z][a-z]"),  # and the first words of sentences
}


class Setting(FileModel):
    """A rule. A token that the exact rule rejects is kept, or *relaxed*, if all conditions of the setting hold.

    Nats are those of the drafted token below the favorite, the target's most likely token.
    """

    rule: Literal["target", "draft", "exact", "relaxed"] = "relaxed"
    num_drafted: int = Field(default=8, ge=1)
    exact: Annotated[tuple[Literal["digits", "operators", "names"], ...], Strict(False)] = ()
    """Kinds of tokens that are exact, if the drafted token or the favorite is one."""
    share: float = Field(default=0.0, ge=0, le=1)
    """Least probability, as a share of the favorite's: it allows -log(share) nats."""
    per_step: float = Field(default=1.0, gt=0)
    """Factor on the allowed nats for every step before."""
    surprise: float = Field(default=0.0, ge=0)
    """Divides the allowed nats by 1 + `surprise` times the mean nats of the text's drafted tokens so far."""
    certainty: float = Field(default=0.0, ge=0)
    """Multiplies the allowed nats by the draft's probability of its token to this power."""
    min_logprob: float = -math.inf
    tolerance: float = Field(default=0.0, ge=0, le=1)
    """Of typical acceptance (arXiv:2401.10774, section 2.3.1)."""
    entropy: float = 0.0
    """Least entropy of the target's three most likely tokens (FLy, arXiv:2511.22972)."""
    window: int = Field(default=0, ge=0)
    """Drafted tokens behind a relaxed one that the exact rule must accept in the same round (FLy)."""
    budget: float = Field(default=math.inf, ge=0)
    """Most nats that the relaxed tokens of a step have together."""
    rewrite: float = Field(default=math.inf, ge=0)
    """With more nats, a step is written again under the exact rule: at temperature 0 from its first relaxed token."""


class SettingsFile(FileModel):
    """The file of settings."""

    version: Version
    settings: dict[str, Setting]


class Row(Record):
    """A finished text. `trace` has all decisions in order, and `relaxed` the place and the nats of relaxed tokens."""

    problem: str
    setting: str
    temperature: float
    how: Setting
    status: str
    tokens: int
    trace: str
    relaxed: list[tuple[int, float]]
    text: str
    answer: tuple[int, int] | None = None
    """Positions in the trace: from where the step that answers is written again, and its end; None without a rule that
    relaxes."""


class Position(NamedTuple):
    """What is known about the next token of a text. Nats and log-probabilities are those at temperature 1."""

    drafted: int
    agrees: bool  # whether the exact rule accepts it
    instead: int  # what the exact rule takes otherwise
    following: int  # the target's own token
    favorite: int
    nats: float  # of the drafted token below the favorite
    logprob: float  # of the drafted token
    entropy: float
    top_entropy: float  # of the three most likely tokens
    certainty: float  # the draft's probability of its token


def positions(target: Tensor, draft: Tensor, temperatures: Tensor, noise: Tensor) -> list[Position]:
    """Return what is known about the next tokens, from logits [B, V], temperatures [B] and random numbers [B, 3]."""
    favorite, drafted = target.argmax(1), draft.argmax(1)
    instead, following, agrees = favorite.clone(), favorite.clone(), drafted == favorite
    if (hot := temperatures > 0).any():
        p, q = ((each[hot] / temperatures[hot, None]).softmax(1) for each in (target, draft))
        to_draft, to_accept, to_choose = noise[hot].unbind(1)
        drafted[hot] = draw(q, to_draft)
        p_drafted, q_drafted = (each.gather(1, drafted[hot, None])[:, 0] for each in (p, q))
        agrees[hot] = to_accept * q_drafted < p_drafted
        refused = ~agrees[hot]
        instead[hot & ~agrees] = draw(residual(p[refused], q[refused]), to_choose[refused])
        following[hot] = draw(p, to_choose)
    total, token = target.logsumexp(1, keepdim=True), drafted[:, None]
    logprob, top = target.gather(1, token) - total, target.topk(3).values - total
    entropy, top_entropy = total[:, 0] - (target.softmax(1) * target).sum(1), -(top.exp() * top).sum(1)
    certainty = (draft.gather(1, token)[:, 0] - draft.logsumexp(1)).exp()
    columns: list[Any] = [drafted, agrees, instead, following, favorite, top[:, 0] - logprob[:, 0], logprob[:, 0]]
    columns += [entropy, top_entropy, certainty]
    return [Position(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


@dataclass
class Text:
    """A problem under a setting, and what is written so far."""

    problem: EvalProblem
    setting: str
    how: Setting
    temperature: float
    prompt: Sequence[int]
    tokenizer: HuggingFaceTokenizer
    out: list[int] = field(default_factory=list[int])
    trace: str = ""
    relaxed: list[tuple[int, float, int]] = field(default_factory=list[tuple[int, float, int]])
    """Place, nats below the favorite, and what the exact rule takes instead."""
    _places: list[int] = field(default_factory=list[int])  # of the tokens of `out` in the trace
    _num_steps: int = 0
    _step: int = 0  # where the current step begins
    _is_exact: bool = False  # whether the current step is written again
    _drafted: int = 0  # tokens of the round that were kept
    _left: int = 0  # tokens behind the last relaxed one that must still agree
    _nats: float = 0.0  # sum over all drafted tokens

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.problem.id} {self.temperature:g}")

    @property
    def num_read(self) -> int:
        """Number of ids before the last one."""
        return len(self.prompt) + len(self.out) - 1

    @property
    def ended(self) -> bool:
        """Whether the text ended by itself."""
        return bool(self.out) and self.out[-1] in self.tokenizer.end_ids

    def advance(self, found: Position) -> None:
        """Add a token, or drop some as well."""
        kind = ACCEPTED if found.agrees else RELAXED if self._keeps(found) else REFUSED
        self._nats += found.nats
        if self.how.rule in ("target", "draft"):
            self._add(found.following if self.how.rule == "target" else found.drafted, kind)
        elif self._drafted == self.how.num_drafted:
            self._end_round(len(self.out))
            self._add(found.following, kind.upper())
        elif kind == REFUSED:
            at, _, instead = self.relaxed[-1] if self._left else (len(self.out), 0.0, found.instead)
            self._end_round(at)
            self._add(instead, kind)
        else:
            self._left = self.how.window if kind == RELAXED else max(0, self._left - 1)
            self._drafted += 1
            if kind == RELAXED:
                self.relaxed.append((len(self.out), found.nats, found.instead))
            self._add(found.drafted, kind)
        self._close_step()

    def _keeps(self, found: Position) -> bool:
        how, tokens = self.how, {found.drafted, found.favorite}
        if how.rule != "relaxed" or self._is_exact or self._left or tokens & self.tokenizer.end_ids:
            return False
        if how.window and self._drafted + how.window >= how.num_drafted:
            return False
        if any(KINDS[kind].search(self.tokenizer.piece(token)) for kind in how.exact for token in tokens):
            return False
        nats = -math.log(how.share) if how.share else math.inf
        nats *= how.per_step**self._num_steps * found.certainty**how.certainty
        nats /= 1 + how.surprise * self._nats / max(1, len(self.trace))
        typical = min(how.tolerance, math.sqrt(how.tolerance) * math.exp(-found.entropy))
        return (
            found.nats <= min(nats, how.budget - self._spent())
            and found.logprob >= how.min_logprob
            and math.exp(found.logprob) >= typical
            and found.top_entropy >= how.entropy
        )

    def _spent(self) -> float:
        """Return the nats of the current step's relaxed tokens."""
        return sum(nats for place, nats, _ in self.relaxed if place >= self._step)

    def _add(self, token: int, kind: str) -> None:
        self.out.append(token)
        self._places.append(len(self.trace))
        self.trace += kind

    def _end_round(self, at: int) -> None:
        """Drop all tokens from a place on."""
        del self.out[at:], self._places[at:]
        self.relaxed = [each for each in self.relaxed if each[0] < at]
        self._drafted = self._left = 0

    def _close_step(self) -> None:
        """Begin another step behind a blank line, or the same one again."""
        if self._left or not self.out or "\n\n" not in self.tokenizer.piece(self.out[-1]):
            return
        if self._spent() <= self.how.rewrite:
            self._step, self._is_exact, self._num_steps = len(self.out), False, self._num_steps + 1
            return
        place, _, instead = next(each for each in self.relaxed if each[0] >= self._step)
        self._is_exact = True
        self.trace += REWRITTEN
        self._end_round(self._step if self.temperature else place)
        if not self.temperature:
            self.out.append(instead)
            self._places.append(len(self.trace) - 1)
            self._close_step()

    def _answer(self) -> tuple[int, int]:
        """Return from where the exact rule writes the step that answers again, and its end, as places in the trace."""
        chunks, places = [self.tokenizer.piece(token) for token in self.out], [*self._places, len(self.trace)]
        before, start, last = "", 0, len(chunks)
        for end in (*(number for number, chunk in enumerate(chunks, 1) if "\n\n" in chunk), last):
            step = "".join(chunks[start:end])
            if end == last or marks_answer(step, before):
                relaxed = [place for place, _, _ in self.relaxed if start <= place < end]
                first = relaxed[0] if relaxed and not self.temperature else start
                return places[first if relaxed else end], places[end]
            before, start = step, end
        raise AssertionError("the last step answers")

    def row(self, grading: Grading) -> Row:
        """Return the finished text."""
        text = self.tokenizer.decode(self.out[:-1] if self.ended else self.out)
        return Row(
            problem=self.problem.id,
            setting=self.setting,
            temperature=self.temperature,
            how=self.how,
            status=grading.grade(text, self.problem.gold, cut_short=not self.ended).status,
            tokens=len(self.out),
            trace=self.trace,
            relaxed=[(place, round(nats, 3)) for place, nats, _ in self.relaxed],
            text=text,
            answer=self._answer() if self.how.rule == "relaxed" else None,
        )


class Lockstep:
    """Two models that read the same texts, each in the slot of its number in `texts`.

    Args:
        models: target and draft.
        max_texts: most texts in a batch.
        length: most ids of a prompt and its text.
    """

    def __init__(self, models: Sequence[CausalModel], max_texts: int, length: int) -> None:
        self.models, self.max_texts, self.texts = models, max_texts, list[Text]()
        self._prompt: Sequence[int] = ()  # what the slot behind those of the texts has read
        for model in models:
            model.cache.reserve(max_texts + 1, length + BLOCK)  # growing would copy it

    @torch.inference_mode()
    def write(self, waiting: Iterator[Text], max_tokens: int) -> Iterator[Text]:
        """Write all texts, as many as fit in a batch together, and yield each one when it is finished."""
        while True:
            for text in islice(waiting, self.max_texts - len(self.texts)):
                self._begin(text)
            if not self.texts:
                return
            self._step()
            for index in reversed(range(len(self.texts))):
                text = self.texts[index]
                if text.ended or len(text.out) >= max_tokens:
                    self._remove(index)
                    yield text

    def _begin(self, text: Text) -> None:
        for model in self.models:
            if text.prompt != self._prompt:
                model.rollback(self.max_texts, 0)
                model.extend([self.max_texts], [text.prompt[:-1]], keep=[[]])
            model.cache.copy_slot(self.max_texts, len(self.texts), text.num_read)
        self._prompt = text.prompt
        self.texts.append(text)

    def _step(self) -> None:
        slots, ids = [*range(len(self.texts))], [[*text.prompt[-1:], *text.out][-1:] for text in self.texts]
        for model, (slot, text) in product(self.models, enumerate(self.texts)):
            model.rollback(slot, text.num_read)
        target, draft = (torch.cat(model.extend(slots, ids)) for model in self.models)  # [B, V]
        temperatures = torch.tensor([text.temperature for text in self.texts])
        noise = torch.tensor([[text.random.random() for _ in range(3)] for text in self.texts], dtype=torch.float64)
        for start in range(0, len(self.texts), TOGETHER):
            part = slice(start, start + TOGETHER)
            found = positions(target[part], draft[part], temperatures[part], noise[part])
            for text, position in zip(self.texts[part], found, strict=True):
                text.advance(position)

    def _remove(self, index: int) -> None:
        """Remove a text. The last one takes its slot."""
        last = self.texts.pop()
        if index < len(self.texts):
            self.texts[index] = last
            for model in self.models:
                model.cache.copy_slot(len(self.texts), index, last.num_read)


class Figures(Record):
    """A setting on the problems that the target has too. Relaxed and refused tokens are shares of all."""

    setting: str
    temperature: float
    problems: int
    correct: float
    difference: float  # from the target's share of right answers
    interval: tuple[float, float]
    relaxed: float
    refused: float
    again: float | None = None  # share of the tokens that are written again; None if the rows do not say
    per_round: float | None  # tokens
    speeds: list[tuple[float, int]]  # by `COSTS`: times the target, and the fastest number of drafted tokens


class Findings(Conditions):
    """The file that `python -m evals.bench lab --json` writes."""

    version: Literal[1] = 1
    pair: str
    benchmark: str
    costs: tuple[tuple[float, float], ...] = COSTS
    figures: list[Figures]


def figures(rows: Mapping[str, Row], target: Mapping[str, Row]) -> Figures:
    """Return a setting's figures from its rows and the target's by problem."""
    own = [rows[problem] for problem in target if problem in rows]
    how, tokens, compared = own[0].how, sum(row.tokens for row in own), paired(rows, target)
    answers = [row.answer for row in own if row.answer is not None]
    alone = {"target": [(1.0, 0)] * len(COSTS), "draft": []}
    return Figures(
        setting=own[0].setting,
        temperature=own[0].temperature,
        problems=len(own),
        correct=sum(row.status == "correct" for row in own) / len(own),
        difference=compared.difference,
        interval=compared.interval(),
        relaxed=sum(len(row.relaxed) for row in own) / tokens,
        refused=sum(row.trace.count(REFUSED) for row in own) / tokens,
        per_round=None if how.rule in alone else tokens / num_rounds(own, how.num_drafted),
        again=sum(end - first for first, end in answers) / tokens if len(answers) == len(own) else None,
        speeds=alone[how.rule] if how.rule in alone else speeds(own, [*target.values()], COSTS),
    )


def paired(rows: Mapping[str, Row], target: Mapping[str, Row]) -> Paired:
    """Return a setting's right answers beside the target's, on the problems that both have."""
    both = [problem for problem in target if problem in rows]
    right, theirs = ([float(each[problem].status == "correct") for problem in both] for each in (rows, target))
    return Paired.of(right, theirs)


def speeds(own: Sequence[Row], target: Sequence[Row], costs: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
    """Return a setting's speed for each cost, in times of the target alone, with its best number of drafted tokens.

    Args:
        own: the setting's rows.
        target: those of the target.
        costs: pairs as in `COSTS`.
    """
    how, tokens = own[0].how, sum(row.tokens for row in own)
    # What a window relaxes depends on the number of drafted tokens.
    numbers = {how.num_drafted} if how.window else {how.num_drafted, *DRAFTED}
    exact = [row.model_copy(update={"answer": None}) for row in target]
    target_tokens = sum(row.tokens for row in exact)
    rounds = {number: num_rounds(own, number, num_rounds(exact, number) / target_tokens) for number in numbers}
    return [max((tokens / count / (1 + k * (c + r)), k) for k, count in rounds.items()) for c, r in costs]


def num_rounds(rows: Sequence[Row], num_drafted: int, for_token: float | None = None) -> float:
    """Return the rounds of texts with so many drafted tokens: what is kept of these, and another token.

    Args:
        rows: the texts.
        num_drafted: drafted tokens of a round.
        for_token: rounds of the exact rule for a token. With it, the step that answers is written again, and what is
            behind it exactly.
    """
    each_round = re.compile(rf"[{ACCEPTED}{RELAXED}]{{0,{num_drafted}}}.{REWRITTEN}?", re.IGNORECASE)
    if for_token is None:
        return sum(len(each_round.findall(row.trace)) for row in rows)
    ends = [row.answer or (len(row.trace), len(row.trace)) for row in rows]
    exact = sum(len(row.trace) - first for row, (first, _) in zip(rows, ends, strict=True))
    return exact * for_token + sum(
        len(each_round.findall(row.trace[:end])) for row, (_, end) in zip(rows, ends, strict=True)
    )


def all_figures(rows: Sequence[Row]) -> list[Figures]:
    """Return the figures of all settings at each temperature.

    The exact rule has the target's rows if it was not run: above temperature 0 its texts differ, but not their
    distribution.
    """
    return [
        figures(own, settings[BASELINE])
        for settings in by_temperature(rows).values()
        for own in settings.values()
        if own.keys() & settings[BASELINE].keys()
    ]


def by_temperature(rows: Sequence[Row]) -> Mapping[float, Mapping[str, Mapping[str, Row]]]:
    """Return the rows by temperature, setting and problem, with the exact rule among the settings.

    Raises:
        UsageError: the target has no rows.
    """
    found: dict[float, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[row.temperature][row.setting][row.problem] = row
    for settings in found.values():
        if BASELINE not in settings:
            raise UsageError(f"There are no rows of the setting {BASELINE!r}, which all others are compared with.")
        exact = {"how": Setting(rule="exact"), "setting": "exact"}
        settings.setdefault("exact", {key: row.model_copy(update=exact) for key, row in settings[BASELINE].items()})
    return found


def fronts(found: Sequence[Figures]) -> Iterator[str]:
    """Yield for each cost the settings that none beats in both speed and loss, the fastest first."""
    for index, (c, r) in enumerate(COSTS):
        points = [each for each in found if each.speeds]
        kept, best = list[str](), -math.inf
        for each in sorted(points, key=lambda each: (each.speeds[index][0], each.difference), reverse=True):
            if each.difference > best:
                best = each.difference
                kept.append(f"{each.setting} {each.speeds[index][0]:.2f}× ({100 * best:+.1f})")
        yield f"front at c = {c:g}, r = {r:g}: {', '.join(kept)}"


HEADS = ("setting", "problems", "correct", "difference", "relaxed", "refused", "again", "a round")
COST_HEADS = tuple(f"c {c:g}" for c, _ in COSTS)


def cells(each: Figures) -> list[str]:
    """Return a row of the table, by `HEADS` and `COSTS`."""
    return [
        *(each.setting, str(each.problems), f"{each.correct:.1%}"),
        "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * share for share in (each.difference, *each.interval))),
        *(f"{each.relaxed:.1%}", f"{each.refused:.1%}"),
        UNKNOWN if each.again is None else f"{each.again:.1%}",
        UNKNOWN if each.per_round is None else f"{each.per_round:.2f}",
        *([f"{times:.2f}× ({number})" for times, number in each.speeds] or [UNKNOWN] * len(COSTS)),
    ]


SHOWN = ("setting", "problems", "correct", "difference", "relaxed", "a round", "c 0.06", "c 0.1", "c 0.26")
"""Columns of the table in the documents."""


def rows_of(found: Findings) -> list[list[str]]:
    """Return the rows of the table in the documents: the temperature, and the cells of `SHOWN`."""
    figures = sorted(found.figures, key=lambda each: each.temperature)
    tables = [(each, dict(zip((*HEADS, *COST_HEADS), cells(each), strict=True))) for each in figures]
    return [[f"{each.temperature:g}", *(row[head] for head in SHOWN)] for each, row in tables]


def in_words(found: Findings) -> str:
    """Return what was measured."""
    weights = "int8" if found.pair == QWEN_NAME else "float32"
    return f"pair `{found.pair}`, both models in {weights}; problems of {found.benchmark}"


def chosen_settings(names: str | None) -> dict[str, Setting]:
    """Return settings of `lab.toml` by name.

    Raises:
        UsageError: there is no such setting.
    """
    known = load_toml(Path(__file__).with_suffix(".toml"), SettingsFile)[0].settings
    chosen = names.split(",") if names else [*known]
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(unknown_name("setting", unknown[0], known))
    return {name: known[name] for name in chosen}


def main(
    rows: Annotated[Path | None, typer.Option(metavar="FILE", help="File of rows, which a run continues.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Report these rows and run nothing.")] = None,
    settings: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Settings of evals/bench/lab.toml. Default: all.")
    ] = None,
    pair: Annotated[str, typer.Option(metavar="NAME", help="A pair of models by name.")] = QWEN_NAME,
    benchmark: Annotated[str, typer.Option(help="A benchmark, for wording and grading.")] = "gsm8k",
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Other problems in the benchmark's form.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Number of problems to leave out.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 200,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Sampling temperature; repeat it for several. Default: 0.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of a text.")] = 448,
    batch: Annotated[int, typer.Option(min=1, help="Most texts in a batch.")] = 128,
    json_file: JsonOption = None,
) -> None:
    """Try rules that accept drafted tokens: what they keep, what they lose, and how fast they could be."""
    file, about = rows or report, conditions()
    if file is None or (rows and report):
        raise UsageError("Give --rows FILE to run, or --report FILE to report what a run has stored.")
    if rows:
        loaded = load_benchmark(benchmark)[1]
        if data is not None:
            loaded = loaded.model_copy(update={"data": FileData(kind="file", answer_from="hashes")})
        problems = load_problems(loaded, data, skip + limit).problems[skip:]
        folder, options = find_pair(pair), "?quantize=int8" if pair == QWEN_NAME else ""
        target, draft = (TorchEngine.load(f"{folder / role}{options}") for role in ("target", "draft"))
        prompts = [encode_request(target.tokenizer, asked(loaded, problem.question)) for problem in problems]
        stored = {(row.temperature, row.problem, row.setting, row.how) for row in stored_rows(file, Row)}
        texts = [
            Text(problem, name, how, each, prompt, target.tokenizer)
            for each, (problem, prompt), (name, how) in product(
                temperature or [0.0], zip(problems, prompts, strict=True), chosen_settings(settings).items()
            )
            if (each, problem.id, name, how) not in stored
        ]
        lockstep = Lockstep((target.model, draft.model), batch, max_tokens + max(map(len, prompts), default=0))
        grading = Grading(loaded.grader, last_number=loaded.last_number)
        with grading, make_meter() as meter, file.open("a", encoding="utf-8") as output:
            meter.begin("texts")
            num_tokens, since = 0, time.perf_counter()
            for number, text in enumerate(lockstep.write(iter(texts), max_tokens), 1):
                output.write(text.row(grading).model_dump_json(exclude_defaults=True) + "\n")
                output.flush()
                num_tokens += len(text.out)
                meter.show(f"{num_tokens / (time.perf_counter() - since):.1f} tokens/s", number, len(texts))
    found = all_figures(finished_rows(file, Row))
    outputs = list[Table | str]()
    for at in dict.fromkeys(each.temperature for each in found):
        own = [each for each in found if each.temperature == at]
        title = f"temperature {at:g}; times the target at the best number of drafted tokens"
        outputs += [cells_table(title, (*HEADS, *COST_HEADS), map(cells, own)), *fronts(own)]
    finish(
        outputs, Findings.model_validate({**about, "pair": pair, "benchmark": benchmark, "figures": found}), json_file
    )
