"""What a text may go on with where it has to be JSON of some form: masks over the vocabulary, by llguidance.

A mask is made for the next token and for the one behind each drafted token, so that constrained text is drafted and
verified like any other, and has the target's law among what is allowed.
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

from stepspec.errors import EngineError, UsageError
from stepspec.hugging_face import HuggingFaceTokenizer

BEFORE, WITHIN = r"\n{0,2}", r"\n?[ \t]{0,16}"
"""White space in front of JSON and wherever it may have some; not without end, which weak models never reach."""
GRAMMARS_KEPT = 64
"""Of the last schemas: each is asked for before a request begins and again when its answer does."""


class Constraint:
    """One text and the form that it has to have."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def consume(self, tokens: Sequence[int]) -> None:
        """Takes what was written.

        Raises:
            EngineError: nothing can be told of what may follow.
        """
        if not self.matcher.consume_tokens(list(tokens)):
            raise EngineError(f"The text could not be held to its schema: {self.matcher.get_error()}")


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
        except ValueError as error:
            raise UsageError(f"The JSON schema is no JSON: {error}.") from error
        if not isinstance(form, dict):
            raise UsageError("The JSON schema is no object.")
        form["x-guidance"] = {"whitespace_pattern": WITHIN}
        grammar = LLMatcher.grammar_from_lark(f"start: /{BEFORE}/ value\nvalue: %json {json.dumps(form)}")
        if problem := LLMatcher.validate_grammar(grammar, self._vocabulary):
            reason = problem.partition("\n")[0].partition("JSON schema: ")[2] or problem.partition("\n")[0]
            raise UsageError(f"The JSON schema cannot be kept to: {reason.rstrip('.')}.")
        return grammar


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
