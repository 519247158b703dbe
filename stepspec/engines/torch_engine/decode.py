"""One round of generation for several rows: draft, verify in one pass, accept (arXiv:2211.17192, algorithm 1).

The last emitted token of a row is not in the cache yet. A pass of the target reads it together with the drafted
tokens; the logits give the distribution at each drafted position and one beyond. Each row has its own random numbers,
so its tokens do not depend on the other rows of the pass.

The inputs of a round go to the device in one copy, and the results come back in one copy. In between, nothing waits for
the device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.torch_engine import relaxation, sampling
from stepspec.engines.torch_engine.constraint import allowed_tokens
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter
from stepspec.engines.torch_engine.graphs import bucket
from stepspec.engines.torch_engine.model import Branch, CausalModel, Positions
from stepspec.engines.torch_engine.pace import MAX_TOKENS, Pacer, Round
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import ACCEPT, RESAMPLE, Decision, Samplers, uniform
from stepspec.engines.torch_engine.stopwatch import Stopwatch, Timing
from stepspec.engines.torch_engine.transfer import download, upload

MAX_LOOKED_UP = 4
"""Rows of a round in which tokens are looked up instead of drafted. In larger rounds, seldom every row repeats text."""

Decide = Callable[[Tensor, Draft, Tensor, Tensor, Samplers], Decision]


def verify_and_accept(
    target: CausalModel,
    positions: Positions,
    last: Tensor,
    counts: Tensor,
    draft: Draft,
    how: Samplers,
    decide: Decide,
    detailed: bool,
) -> Tensor:
    """Run one pass of the target over each row's last token and its drafted tokens, and accept or reject these.

    Args:
        target: the target model.
        positions: positions of each row's last token.
        last: each row's last token, [B].
        counts: `draft.counts`, [B].
        draft: up to K tokens per row.
        how: sampling settings of the rows.
        decide: the function `decide`, or the hook of a benchmark.
        detailed: whether the outcome includes `sampling.details` of the emitted tokens.

    Returns:
        The outcome, [B, K + 2]. Column 0, n, is the number of accepted tokens; columns 1 to n + 1 are these tokens and
        the one that follows. A relaxed token x is stored as -x - 1.
        A detailed outcome is float64 with 2 * (K + 1) further columns, the details of each token.
    """
    hidden = target.read(positions, torch.cat([last[:, None], draft.tokens], 1))
    return accept(target, hidden, positions.starts, counts, draft, how, decide, detailed)


def accept(
    target: CausalModel,
    hidden: Tensor,
    starts: Tensor,
    counts: Tensor,
    draft: Draft,
    how: Samplers,
    decide: Decide,
    detailed: bool,
) -> Tensor:
    """Accept or reject drafted tokens by the hidden states [B, K + 1, W] of a pass over them.

    `starts` are the positions of the last tokens, [B]. The other arguments and what it returns are
    `verify_and_accept`'s.
    """
    tokens = draft.tokens
    seen, partial = sampling.seen_along(how, tokens), target.vocabulary is not None
    own = target.logits(hidden)  # [B, K + 1, V]
    logits = sampling.edited(own, how, seen, partial=partial)
    num_kept, following, relaxed = decide(logits, draft, counts, starts + 1, how)
    index = num_kept[:, None]
    emitted = torch.cat([tokens, tokens.new_zeros(len(tokens), 1)], 1).scatter(1, index, following[:, None])
    marked = emitted if relaxed is None else torch.where(pad(relaxed, (0, 1)), ~emitted, emitted)
    outcome = torch.cat([index, marked], 1)
    if detailed:  # float64 holds every token id, so one copy brings all of it to the host
        outcome = torch.cat([outcome.double(), sampling.details(own, emitted).flatten(1).double()], 1)
    return outcome


def decide(logits: Tensor, draft: Draft, counts: Tensor, first: Tensor, how: Samplers) -> Decision:
    """Decide which drafted tokens stand and which token follows them.

    Args:
        logits: [B, K + 1, V].
        draft: K tokens per row.
        counts: how many of them each row has, [B].
        first: positions of the first drafted tokens, [B].
        how: sampling settings of the rows.
    """
    drafted, p = draft.tokens, None if how.temperature is None else sampling.distributions(logits, how)
    relax = None
    if how.relaxation is not None and drafted.shape[1]:
        relax = partial(_relaxed, logits[:, :-1], drafted, p, how, how.relaxation)
    if p is None:
        return sampling.accept_choices(logits.argmax(-1), drafted, counts, relax)
    positions = first[:, None] + torch.arange(logits.shape[1], device=logits.device)
    noise = uniform(how.keys, positions, RESAMPLE)
    if draft.distributions is None:
        return sampling.accept_choices(sampling.draw(p, noise), drafted, counts, relax)
    accept_noise = uniform(how.keys, positions[:, :-1], ACCEPT)
    return sampling.accept(p, draft.distributions, drafted, counts, accept_noise, noise, relax)


def _relaxed(
    logits: Tensor, drafted: Tensor, p: Tensor | None, how: Samplers, rules: relaxation.Relaxation, accepted: Tensor
) -> Tensor:
    """Return what `relaxation.relaxed` does, without tokens that top-k, top-p and min-p leave out. p: [B, K + 1, V]."""
    found = relaxation.relaxed(rules, logits, drafted, accepted)
    if p is None:
        return found
    possible = p[:, :-1].gather(-1, drafted[..., None])[..., 0] > 0
    return found & (possible if how.greedy is None else possible | how.greedy[:, None])


def write_next(target: CausalModel, positions: Positions, last: Tensor, how: Samplers, detailed: bool) -> Tensor:
    """Write each row's next token, without drafted ones. The arguments and what it returns are `verify_and_accept`'s.

    It does less than that function for no drafted tokens. A model with a draft vocabulary samples within it.
    """
    hidden, partial = target.read(positions, last[:, None]), target.partial
    within = partial is not None and not how.edits
    own = partial.scored(hidden) if partial is not None and within else target.logits(hidden)
    seen = None if how.seen is None else how.seen.before()
    logits = own if within else sampling.edited(own, how, seen, partial=partial is not None)
    places, _ = sampling.choose(logits, positions.starts[:, None] + 1, how, RESAMPLE)
    tokens = partial.named(places) if partial is not None and within else places
    outcome = torch.cat([torch.zeros_like(tokens), tokens], 1)
    if detailed:
        outcome = torch.cat([outcome.double(), sampling.details(own, places).flatten(1).double()], 1)
    return outcome


@dataclass
class Reading:
    """Rows to read in a pass: chunks of prompts and steps.

    Attributes:
        slots: their slots.
        starts: positions of their first ids.
        ids: the rows.
        keep: the columns of each row whose logits are wanted.
        branches: the branches at the end of each row.
        hidden: their hidden states after the pass, one row after the other, [1, N, W].
    """

    slots: Sequence[int]
    starts: Sequence[int]
    ids: Sequence[list[int]]
    keep: Sequence[Sequence[int]]
    branches: Sequence[Sequence[Branch]]
    hidden: Tensor | None = None


class Rounds:
    """Runs the rounds of one target."""

    def __init__(
        self,
        target: CausalModel,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._metrics = metrics
        self._clock = clock
        self.watch = Stopwatch(metrics, target.device, clock)
        """Times all passes of the target and of its drafters."""
        self._rows: list[BatchRow] = []
        self._how: Samplers | None = None
        self.pacers: dict[Drafter, Pacer] = {}

    def forget(self) -> None:
        """Drop what was learned from texts about drafters; the costs of rounds are preserved."""
        for pacer in self.pacers.values():
            pacer.forget()

    def start(self, rows: Sequence[BatchRow], logits: Tensor) -> None:
        """Emit each row's first token, from logits [B, V] of the pass over its prompt."""
        draft = Draft.empty(len(rows), logits.device)
        how = self._constrained(self._samplers(rows), rows, draft)
        firsts = upload([row.length for row in rows], logits.device)
        seen, partial = None if how.seen is None else how.seen.before(), self._target.vocabulary is not None
        edited = sampling.edited(logits[:, None], how, seen, partial=partial)
        tokens = decide(edited, draft, firsts.new_zeros(len(rows)), firsts, how).following
        detailed = any(row.details is not None for row in rows)
        found = [tokens, *([sampling.details(logits[:, None], tokens[:, None])] if detailed else [])]
        written, *values = download(*found)
        for place, (row, token) in enumerate(zip(rows, written, strict=True)):
            row.emit([int(token)], 0, [values[0][2 * place : 2 * place + 2]] if detailed else None)
            for each in (self._metrics, row.metrics):
                each.generated += 1

    def may_share(self, rows: Sequence[BatchRow], drafter: Drafter | None) -> bool:
        """Whether the rows' next pass may read other rows too. Some passes do not, to measure what they cost."""
        pacer = self._pacer(rows, drafter)
        return self._target.reads_ragged and (pacer is None or pacer.knows_costs(bucket(len(rows))))

    def run(self, rows: Sequence[BatchRow], drafter: Drafter | None = None, beside: Reading | None = None) -> None:
        """Advance every row by at least one token, and by up to one more than the number it drafts.

        `beside` is read in the same pass; see `may_share`.
        """
        target, how, pacer = self._target, self._samplers(rows), self._pacer(rows, drafter)
        looked_up = self._looked_up(rows, drafter, pacer, how)
        wanted = [0] * len(rows) if looked_up is not None else self._wanted(rows, pacer)
        started = self._clock()
        catching_up, drafting, draft = Timing(), Timing(), None
        if drafter is not None and any(wanted):
            with self.watch.time("draft", [row.metrics for row in rows]) as catching_up:
                drafter.catch_up(rows)
            with self.watch.time("draft", [row.metrics for row in rows]) as drafting:
                draft = drafter.propose(rows, wanted, how)
        draft = looked_up or draft or Draft.empty(len(rows), target.device)
        found = draft.counts
        if pacer is not None and any(wanted) and any(found) and all(row.drafting.num_tokens is None for row in rows):
            draft = draft.narrowed(pacer.worth_verifying(rows, found, bucket(len(rows))))
        how = self._constrained(how, rows, draft)
        num_tokens = draft.tokens.shape[1]
        assert all(target.cache_length(row.slot.index) == row.length - 1 for row in rows), (
            "each prompt is read before its first round"
        )
        table = [
            (row.slot.index, row.length - 1, row.last, count) for row, count in zip(rows, draft.counts, strict=True)
        ]
        positions, (last, counts) = target.pass_inputs(table, num_tokens + 1)
        with self.watch.time("verify", [row.metrics for row in rows]):
            detailed = any(row.details is not None for row in rows)
            if beside is not None:
                read = torch.cat([last[:, None], draft.tokens], 1)
                lengths = [count + 1 for count in draft.counts]
                hidden, beside.hidden = target.read_beside(
                    positions, read, lengths, beside.slots, beside.starts, beside.ids, beside.branches
                )
                outcome = accept(target, hidden, positions.starts, counts, draft, how, decide, detailed)
            elif num_tokens:
                outcome = verify_and_accept(target, positions, last, counts, draft, how, decide, detailed)
            else:
                outcome = write_next(target, positions, last, how, detailed)
            outcomes = outcome.tolist()
        self.watch.settle()
        if pacer is not None:
            done = Round(
                num_asked=max(wanted),
                found=found,
                drafted=draft.counts,
                accepted=[int(num_kept) for num_kept, *_ in outcomes],
                catch_up_s=catching_up.seconds,
                draft_s=drafting.seconds,
                verify_s=self._clock() - started - catching_up.seconds - drafting.seconds,
                shared=beside is not None,
                looked_up=looked_up is not None,
            )
            pacer.note(rows, bucket(len(rows)), done)
        for row, num_drafted, values in zip(rows, draft.counts, outcomes, strict=True):
            before, num_kept = len(row.beyond), int(values[0])
            tokens, numbers = [int(value) for value in values[1 : num_kept + 2]], values[num_tokens + 2 :]
            details = list(zip(numbers[::2], numbers[1::2], strict=True)) if detailed else None
            if how.relaxation is not None:
                row.relaxed += [before + place for place, token in enumerate(tokens) if token < 0]
                tokens = [~token if token < 0 else token for token in tokens]
            num_accepted = row.emit(tokens, num_kept, details)
            target.cache.lengths[row.slot.index] = row.length - 1
            for each in (self._metrics, row.metrics):
                each.note_round(num_drafted, num_accepted, len(row.beyond) - before)
        for each in (self._metrics, *(row.metrics for row in rows)):
            each.passes["verify"] += 1
            if draft.passes:
                each.passes["draft"] += draft.passes
        if drafter is not None:
            drafter.roll_back(rows)

    def _pacer(self, rows: Sequence[BatchRow], drafter: Drafter | None) -> Pacer | None:
        """Return the drafter's pacer; None without a drafter, or if every row fixes how many tokens to draft."""
        if drafter is None or all(row.drafting.num_tokens is not None for row in rows):
            return None
        if drafter not in self.pacers:
            self.pacers[drafter] = Pacer(by_token=drafter.by_token)
        return self.pacers[drafter]

    def _looked_up(
        self, rows: Sequence[BatchRow], drafter: Drafter | None, pacer: Pacer | None, how: Samplers
    ) -> Draft | None:
        """Return looked-up tokens for every row, if verifying them pays more than what the drafter drafts."""
        lookup = drafter and drafter.lookup
        fixed = any(row.drafting.num_tokens is not None for row in rows)
        if lookup is None or pacer is None or fixed or len(rows) > MAX_LOOKED_UP:
            return None
        draft = lookup.propose(rows, [row.num_wanted(MAX_TOKENS) for row in rows], how)
        if draft is None or not all(draft.counts):
            return None
        count = pacer.num_looked_up(rows, draft.counts, bucket(len(rows)))
        return draft.narrowed(count) if count else None

    def _wanted(self, rows: Sequence[BatchRow], pacer: Pacer | None) -> list[int]:
        """Return how many tokens to draft for each row."""
        free = [row for row in rows if row.drafting.num_tokens is None]
        chosen = pacer.count(free, bucket(len(rows))) if pacer is not None else 0
        return [row.num_wanted(chosen) for row in rows]

    def _samplers(self, rows: Sequence[BatchRow]) -> Samplers:
        """Return the rows' sampling settings. They are rebuilt if the rows change."""
        if self._how is None or self._rows != list(rows):
            self._rows = list(rows)
            self._how = sampling.samplers(
                [row.sampling for row in rows],
                self._target.vocab_size,
                self._target.device,
                [row.drafting.acceptance for row in rows],
                next((row.kinds for row in rows if row.kinds is not None), None),
            )
        if self._how.penalties is None:
            return self._how
        text, output = (torch.stack([*each]) for each in zip(*map(self._seen, rows), strict=True))
        return self._how._replace(seen=sampling.Seen(text, output))

    def _constrained(self, how: Samplers, rows: Sequence[BatchRow], draft: Draft) -> Samplers:
        """Return `how` with the tokens that the rows' constraints allow. Without constraints the draft is not read."""
        constraints = [row.constraint for row in rows]
        if not any(constraints):
            return how
        allowed = allowed_tokens(constraints, draft.tokens.tolist(), self._target.vocab_size, self._target.device)
        return how._replace(allowed=allowed)

    def _seen(self, row: BatchRow) -> sampling.Seen:
        """Return the tokens of a row's text, [V], updated with those since the last call."""
        size, device = self._target.vocab_size, self._target.device
        if row.seen is None:
            row.seen = sampling.Seen(
                torch.zeros(size, dtype=torch.bool, device=device), torch.zeros(size, device=device)
            )
        new = upload(row.ids_from(row.num_seen), device, torch.long)
        written = new[max(0, row.buffer.num_prompt - row.num_seen) :]
        row.seen.text[new] = True
        row.seen.output.index_add_(0, written, torch.ones_like(written, dtype=torch.float32))
        row.num_seen = row.length
        return row.seen
