"""Masks over the vocabulary for text that must conform to a JSON schema, computed by llguidance.

There is one mask for the next token and one after each drafted token. So constrained text is drafted and verified like
any other text, and follows the target's distribution over the allowed tokens.
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
"""White space allowed before the JSON and inside it. It is limited because weak models may never stop writing it."""
GRAMMARS_KEPT = 64
"""How many grammars to cache. A schema is needed twice: before a request starts and when its answer starts."""

STUCK = "no text can match it"


class Constraint:
    """The schema constraint of one text, with its progress.

    A matcher can fail, for example on a pattern with too many states. From then on it allows only the end of the text.
    A text that ends this way is reported as a problem, not as an answer.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.problem: str | None = None
        """Why the text no longer conforms to its schema; None while it does."""

    def consume(self, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Advance by the tokens written. If the text has `ended`, leave out the token that ended it."""
        matches = self.matcher.consume_tokens(list(tokens)) and not self.matcher.is_error()
        if not matches or (ended and not self.matcher.is_accepting()):
            reason = _matcher_error(self.matcher) or "it ended too early"
            self.problem = f"The text does not conform to its JSON schema: {reason}. Simplify the schema."


class Grammars:
    """Grammars of JSON schemas over the vocabulary of one model."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, num_ids: int) -> None:
        self._tokenizer = tokenizer
        self._num_ids = num_ids
        self.grammar = lru_cache(maxsize=GRAMMARS_KEPT)(self._make_grammar)
        """Return the grammar of a schema, cached. Raises the same errors as `constraint`."""

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return from_tokenizer(self._tokenizer.own, self._num_ids, sorted(self._tokenizer.end_ids))

    def constraint(self, schema: str) -> Constraint:
        """Return a constraint for a JSON schema. The first call takes about a second.

        Raises:
            UsageError: the schema is not valid JSON, not an object, or not supported.
        """
        return Constraint(LLMatcher(self._vocabulary, self.grammar(schema)))

    def _make_grammar(self, schema: str) -> str:
        try:
            form = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"The JSON schema is not valid JSON: {error}.") from error
        if not isinstance(form, dict):
            raise UsageError(f"The JSON schema must be an object, got {type(form).__name__}.")
        if not self._tokenizer.end_ids:
            raise UsageError("The model has no end-of-text token, so it does not support JSON schemas.")
        form["x-guidance"] = {"whitespace_pattern": WITHIN}
        value = f"value: %json {json.dumps(form)}"
        grammar = LLMatcher.grammar_from_lark(f"start: /{BEFORE}/ value\n{value}")
        if reason := self._rejection(grammar, LLMatcher.grammar_from_lark(f"start: value\n{value}")):
            raise UsageError(f"The JSON schema is not supported: {reason.rstrip('.')}.")
        return grammar

    def _rejection(self, grammar: str, without_space: str) -> str | None:
        """Return why a grammar cannot be used, as far as can be seen before the first token; None if it can."""
        if problem := LLMatcher.validate_grammar(grammar, self._vocabulary):
            reason = _first_line(problem)
            return reason.partition("JSON schema: ")[2] or reason
        trial = Constraint(LLMatcher(self._vocabulary, without_space))
        can_start = bool(allowed_tokens([trial], [()], self._num_ids, torch.device("cpu")).any())
        return _matcher_error(trial.matcher) or (None if can_start else STUCK)


def _matcher_error(matcher: LLMatcher) -> str | None:
    """Return why a matcher failed; None if it has not."""
    if not matcher.is_error():
        return None
    return STUCK if matcher.stop_reason() == "NoExtensionBias" else _first_line(matcher.get_error())


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


_EXECUTOR = LLExecutor(1)


def allowed_tokens(
    constraints: Sequence[Constraint | None], drafted: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> Tensor:
    """Return which tokens are allowed next and after each drafted token, bool [B, K + 1, V].

    After a drafted token that is itself not allowed, the mask is arbitrary.

    Args:
        constraints: one for each of the B rows; None allows every token.
        drafted: K drafted tokens of each row.
        vocab_size: V.
        device: of the result.
    """
    width = len(drafted[0]) + 1
    bits = allocate_token_bitmask(len(constraints) * width, vocab_size)
    for row, (constraint, tokens) in enumerate(zip(constraints, drafted, strict=True)):
        if constraint is None:
            continue
        if tokens:
            jobs = [(constraint.matcher, row * width, list(tokens))]
            fill_next_token_bitmask_par_with_draft_tokens(_EXECUTOR, jobs, bits)
        else:
            fill_next_token_bitmask(constraint.matcher, bits, row)
    words = torch.from_numpy(bits).to(device).view(len(constraints), width, -1, 1)
    return (words >> torch.arange(32, dtype=torch.int32, device=device) & 1).flatten(2)[..., :vocab_size].bool()
