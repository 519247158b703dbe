"""One round of generation for several rows: draft, verify in one pass, accept (arXiv:2211.17192, algorithm 1).

The last emitted token of a row is not in the cache yet: a pass of the target reads it together with the drafted
tokens, and its logits give the distribution at each drafted position and one beyond. A row's random numbers are its
own, so what it emits does not depend on the rows it shares a pass with.

`verify_and_accept` is a function of tensors alone. What a device has to be told about a round goes there in one copy,
and what came of it comes back in one.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepspec.engines.metrics import Metrics
from stepspec.engines.torch_engine import sampling
from stepspec.engines.torch_engine.constraint import allowed_tokens
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter
from stepspec.engines.torch_engine.graphs import bucket, captured, graph_inputs
from stepspec.engines.torch_engine.model import CausalModel, Positions
from stepspec.engines.torch_engine.pace import Pacer, Round
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import ACCEPT, RESAMPLE, Samplers, uniform
from stepspec.engines.torch_engine.stopwatch import Stopwatch, Timing


def verify_and_accept(
    target: CausalModel, positions: Positions, last: Tensor, counts: Tensor, draft: Draft, how: Samplers
) -> tuple[Tensor, Tensor]:
    """One pass of the target over each row's last token and its drafted ones, and what is emitted because of it.

    Args:
        target: reads at `positions`.
        positions: of the last token of each row.
        last: [B].
        counts: `draft.counts`, [B].
        draft: up to K tokens a row.
        how: how the rows draw.

    Returns:
        [B, K + 2]: how many drafted tokens are kept, then the drafted tokens with, behind those kept, the one that
        follows them; and the hidden states [B, W] that one was drawn from.
    """
    tokens = draft.tokens
    hidden = target.read(positions, torch.cat([last[:, None], tokens], 1))
    seen, partial = sampling.seen_along(how, tokens), target.vocabulary is not None
    logits = sampling.edited(target.logits(hidden), how, seen, partial=partial)  # [B, K + 1, V]
    num_kept, following = decide(logits, draft, counts, positions.starts + 1, how)
    place = num_kept[:, None]
    emitted = torch.cat([tokens, tokens.new_zeros(len(tokens), 1)], 1).scatter(1, place, following[:, None])
    row_hidden = hidden.gather(1, place[..., None].expand(-1, 1, hidden.shape[-1]))[:, 0]
    return torch.cat([place, emitted], 1), row_hidden


def decide(logits: Tensor, draft: Draft, counts: Tensor, first: Tensor, how: Samplers) -> tuple[Tensor, Tensor]:
    """How many drafted tokens are kept and what follows them, [B] each, from logits [B, K + 1, V].

    `first` [B] are the positions of the first drafted tokens.
    """
    override = sampling.overrides(logits, draft.tokens, how)
    if how.temperature is None:
        return sampling.accept_choices(logits.argmax(-1), draft.tokens, counts, override)
    p = sampling.distributions(logits, how)
    positions = first[:, None] + torch.arange(logits.shape[1], device=logits.device)
    noise = uniform(how.keys, positions, RESAMPLE)
    if draft.distributions is None:
        return sampling.accept_choices(sampling.draw(p, noise), draft.tokens, counts, override)
    accept_noise = uniform(how.keys, positions[:, :-1], ACCEPT)
    return sampling.accept(p, draft.distributions, draft.tokens, counts, accept_noise, noise, override)


class Rounds:
    """Runs the rounds of one target."""

    def __init__(
        self,
        target: CausalModel,
        metrics: Metrics,
        filler: BatchRow | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`filler` is a row that nobody waits for; with it rounds are filled up to a few sizes."""
        self._target = target
        self._metrics = metrics
        self._clock = clock
        self._watch = Stopwatch(metrics, target.device, clock)
        self._verify = captured(verify_and_accept, target.device)
        self._filler = filler
        self._rows: list[BatchRow] = []
        self._how: Samplers | None = None
        self._pacers: dict[Drafter, Pacer] = {}

    def forget(self) -> None:
        """Forgets what texts have taught about drafters; what rounds cost stays."""
        for pacer in self._pacers.values():
            pacer.forget()

    def start(self, rows: Sequence[BatchRow], logits: Tensor) -> None:
        """Emits each row's first token, from logits [B, V] that the pass over its prompt has shown."""
        draft = Draft.empty(len(rows), logits.device)
        how = self._constrained(self._samplers(rows), rows, draft)
        firsts = torch.tensor([row.length for row in rows]).to(logits.device)
        seen, partial = None if how.seen is None else how.seen[:, None], self._target.vocabulary is not None
        logits = sampling.edited(logits[:, None], how, seen, partial=partial)
        _, tokens = decide(logits, draft, firsts.new_zeros(len(rows)), firsts, how)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.emit([token], 0)
            for each in (self._metrics, row.metrics):
                each.generated += 1

    def run(self, rows: Sequence[BatchRow], drafter: Drafter | None = None) -> None:
        """Advances every row by at least one token, and by as many as it drafts and one more if that goes well."""
        target, alive, rows = self._target, rows, self._full(rows)
        how = self._samplers(rows)
        pacer = self._pacer(alive, drafter)
        wanted = self._wanted(alive, rows, pacer)
        started = self._clock()
        reading, drafting, draft = Timing(), Timing(), None
        if drafter is not None and any(wanted):
            with self._watch.time("draft", [row.metrics for row in alive]) as reading:
                drafter.catch_up(rows)
            with self._watch.time("draft", [row.metrics for row in alive]) as drafting:
                draft = drafter.propose(rows, wanted, how)
        draft = draft or Draft.empty(len(rows), target.device)
        found = draft.counts[: len(alive)]
        if pacer is not None and any(found) and all(row.drafting.num_tokens is None for row in alive):
            draft = draft.narrowed(pacer.worth_verifying(alive, found, bucket(len(rows))))
        how = self._constrained(how, rows, draft)
        num_tokens = draft.tokens.shape[1]
        assert all(target.cache_length(row.slot.index) == row.length - 1 for row in rows), "prompts are read before"
        table = [
            (row.slot.index, row.length - 1, row.last, count) for row, count in zip(rows, draft.counts, strict=True)
        ]
        positions, (last, counted) = graph_inputs(target, table, num_tokens + 1)
        with self._watch.time("verify", [row.metrics for row in alive]):
            shown = draft._replace(counts=(), passes=0)  # of no interest to the device, and different every time
            outcome, hidden = self._verify(target, positions, last, counted, shown, how)
            outcomes = outcome.tolist()
        self._watch.settle()
        if pacer is not None:
            done = Round(
                num_asked=max(wanted),
                found=found,
                drafted=draft.counts[: len(alive)],
                accepted=[num_kept for num_kept, *_ in outcomes[: len(alive)]],
                catch_up_s=reading.seconds,
                draft_s=drafting.seconds,
                verify_s=self._clock() - started - reading.seconds - drafting.seconds,
            )
            pacer.note(alive, bucket(len(rows)), done)
        for row, num_drafted, (num_kept, *tokens) in zip(alive, draft.counts, outcomes, strict=False):
            before = len(row.generated)
            num_accepted = row.emit(tokens[: num_kept + 1], num_kept)
            target.cache.lengths[row.slot.index] = row.length - 1
            for each in (self._metrics, row.metrics):
                each.note_round(num_drafted, num_accepted, len(row.generated) - before)
        for each in (self._metrics, *(row.metrics for row in alive)):
            each.passes["verify"] += 1
            if draft.passes:
                each.passes["draft"] += draft.passes
        if drafter is not None:
            drafter.observe(alive, hidden)

    def _full(self, rows: Sequence[BatchRow]) -> Sequence[BatchRow]:
        """The rows with as many times the filler as makes them a power of two, if there is a filler."""
        return rows if self._filler is None else [*rows, *[self._filler] * (bucket(len(rows)) - len(rows))]

    def _pacer(self, alive: Sequence[BatchRow], drafter: Drafter | None) -> Pacer | None:
        """What chooses for the drafter, if any row leaves open how many tokens to draft."""
        if drafter is None or all(row.drafting.num_tokens is not None for row in alive):
            return None
        if drafter not in self._pacers:
            self._pacers[drafter] = Pacer(by_token=drafter.by_token)
        return self._pacers[drafter]

    def _wanted(self, alive: Sequence[BatchRow], rows: Sequence[BatchRow], pacer: Pacer | None) -> list[int]:
        """How many tokens to draft for each row, of which the first ones are alive."""
        free = [row for row in alive if row.drafting.num_tokens is None]
        chosen = pacer.count(free, bucket(len(rows))) if pacer is not None else 0
        return [row.num_wanted(chosen) for row in rows]

    def _samplers(self, rows: Sequence[BatchRow]) -> Samplers:
        """How the rows draw; made anew when other rows come together, or when a penalty looks at what was written."""
        if self._how is None or self._how.seen is not None or self._rows != list(rows):
            self._rows = list(rows)
            self._how = sampling.samplers(
                [row.sampling for row in rows],
                self._target.vocab_size,
                self._target.device,
                [row.drafting for row in rows],
            )
            if self._how.penalty is not None:
                self._how = self._how._replace(seen=torch.stack([self._seen(row) for row in rows]))
        return self._how

    def _constrained(self, how: Samplers, rows: Sequence[BatchRow], draft: Draft) -> Samplers:
        """The same with what the rows' constraints allow, if there are any: only then is a draft looked at."""
        constraints = [row.constraint for row in rows]
        if not any(constraints):
            return how
        allowed = allowed_tokens(constraints, draft.tokens.tolist(), self._target.vocab_size, self._target.device)
        return how._replace(allowed=allowed)

    def _seen(self, row: BatchRow) -> Tensor:
        """Which tokens the row's text has, [V]; what is new since the last time is added."""
        if row.seen is None:
            row.seen = torch.zeros(self._target.vocab_size, dtype=torch.bool, device=self._target.device)
        new = row.ids_from(row.num_seen)
        row.seen[torch.tensor(new, device=row.seen.device)] = True
        row.num_seen = row.length
        return row.seen
