"""What a text may go on with where it has to be JSON of some form: masks over the vocabulary, by llguidance.

A mask is made for the next token and for the one behind each drafted token, so that constrained text is drafted and
verified like any other, and has the target's distribution among what is allowed.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from torch import Tensor

from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.errors import UsageError

BEFORE, WITHIN = r"\n{0,2}", r"\n?[ \t]{0,16}"
"""White space in front of JSON and wherever it may have some; not without end, which weak models never reach."""
GRAMMARS_KEPT = 64
"""Of the last schemas: each is asked for before a request begins and again when its answer does."""

STUCK = "no text has the form that it describes"


class Constraint:
    """One text and the form that it has to have.

    A matcher that gives up, for instance on a pattern with too many states, allows nothing but the end of the text
    from there on. Such an end is a problem, and no answer.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.problem: str | None = None
        """Why the text is not held to its form any more; None while it is."""

    def consume(self, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Takes what was written, without the token that ended it if it has `ended`."""
        kept = self.matcher.consume_tokens(list(tokens)) and not self.matcher.is_error()
        if not kept or (ended and not self.matcher.is_accepting()):
            reason = _trouble(self.matcher) or "it ended too early"
            self.problem = f"The text could not be held to its JSON schema: {reason}. Make the schema simpler."


class Grammars:
    """Schemas and the vocabulary of one model."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, num_ids: int) -> None:
        self._tokenizer = tokenizer
        self._num_ids = num_ids
        self.grammar = lru_cache(maxsize=GRAMMARS_KEPT)(self._checked)
        """The grammar of a schema; errors as for `constraint`."""

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return from_tokenizer(self._tokenizer.own, self._num_ids, sorted(self._tokenizer.end_ids))

    def constraint(self, schema: str) -> Constraint:
        """A constraint for a JSON schema; takes a second at the first time.

        Raises:
            UsageError: it is none, or says what cannot be kept to.
        """
        return Constraint(LLMatcher(self._vocabulary, self.grammar(schema)))

    def _checked(self, schema: str) -> str:
        try:
            form = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"The JSON schema is no JSON: {error}.") from error
        if not isinstance(form, dict):
            raise UsageError("The JSON schema is no object.")
        if not self._tokenizer.end_ids:
            raise UsageError("The model has no token that ends a text, so no text can be held to a JSON schema.")
        form["x-guidance"] = {"whitespace_pattern": WITHIN}
        value = f"value: %json {json.dumps(form)}"
        grammar = LLMatcher.grammar_from_lark(f"start: /{BEFORE}/ value\n{value}")
        if reason := self._refusal(grammar, LLMatcher.grammar_from_lark(f"start: value\n{value}")):
            raise UsageError(f"The JSON schema cannot be kept to: {reason.rstrip('.')}.")
        return grammar

    def _refusal(self, grammar: str, without_space: str) -> str | None:
        """Why no text can be held to a grammar, as far as that shows before its first token."""
        if problem := LLMatcher.validate_grammar(grammar, self._vocabulary):
            reason = _first_line(problem)
            return reason.partition("JSON schema: ")[2] or reason
        trial = Constraint(LLMatcher(self._vocabulary, without_space))
        begins = bool(allowed_tokens([trial], [()], self._num_ids, torch.device("cpu")).any())
        return _trouble(trial.matcher) or (None if begins else STUCK)


def _trouble(matcher: LLMatcher) -> str | None:
    """Why a matcher has given up; None if it has not."""
    if not matcher.is_error():
        return None
    return STUCK if matcher.stop_reason() == "NoExtensionBias" else _first_line(matcher.get_error())


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


_EXECUTOR = LLExecutor(1)


def allowed_tokens(
    constraints: Sequence[Constraint | None], drafted: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> Tensor:
    """Which tokens may come next and behind each drafted one, bool [B, K + 1, V].

    Args:
        constraints: of the B rows; a row without one may write anything.
        drafted: K tokens of each row. What may stand behind one that is not allowed itself does not matter.
    """
    width = len(drafted[0]) + 1
    bits = allocate_token_bitmask(len(constraints) * width, vocab_size)
    for row, (constraint, tokens) in enumerate(zip(constraints, drafted, strict=True)):
        if constraint is None:
            continue
        if tokens:
            asked = [(constraint.matcher, row * width, list(tokens))]
            fill_next_token_bitmask_par_with_draft_tokens(_EXECUTOR, asked, bits)
        else:
            fill_next_token_bitmask(constraint.matcher, bits, row)
    words = torch.from_numpy(bits).to(device).view(len(constraints), width, -1, 1)
    return (words >> torch.arange(32, dtype=torch.int32, device=device) & 1).flatten(2)[..., :vocab_size].bool()
