"""Masks over the vocabulary for text that must conform to a JSON schema, computed by llguidance.

There is one mask for the next token and one after each drafted token. So constrained text is drafted and verified like
any other text, and follows the target's distribution over the allowed tokens.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from torch import Tensor

from stepspec.base.json_scanner import JsonScanner
from stepspec.base.json_schema import Part, part_at
from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.engines.protocol import GRAMMAR_OPTIONS
from stepspec.engines.torch_engine.transfer import moved
from stepspec.errors import UsageError

BEFORE, WITHIN = r"\n{0,2}", r"\n?[ \t]{0,16}"
"""White space allowed before the JSON and inside it. It is limited because weak models may never stop writing it."""
MAX_DIGITS = 20
"""Digits in a row that a number has at most, for the same reason. Every integer of 64 bits fits."""
GRAMMARS_KEPT = 64
"""How many grammars to cache. A schema is needed twice: before a request starts and when its answer starts."""

STUCK = "no text can match it"


class Constraint:
    """The schema constraint of one text, with its progress.

    A matcher can fail, for example on a pattern with too many states. From then on it allows only the end of the text.
    A text that ends this way is reported as a problem, not as an answer.
    """

    def __init__(self, matcher: LLMatcher, digits: "DigitLimit") -> None:
        self.matcher = matcher
        self._digits, self._run = digits, DigitRun()
        self.problem: str | None = None
        """Why the text no longer conforms to its schema; None while it does."""

    def too_long(self, drafted: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the tokens that would make a number too long, next and after each drafted token."""
        run = copy(self._run)
        yield self._digits.too_long(run)
        for token in drafted:
            run.read(self._digits.piece(token))
            yield self._digits.too_long(run)

    def consume(self, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Advance by the tokens written. If the text has `ended`, leave out the token that ended it."""
        for token in tokens:
            self._run.read(self._digits.piece(token))
        matches = self.matcher.consume_tokens(list(tokens)) and not self.matcher.is_error()
        if not matches or (ended and not self.matcher.is_accepting()):
            reason = _matcher_error(self.matcher) or "it ended too early"
            self.problem = f"The JSON schema cannot be followed: {reason}. Simplify it."


@dataclass
class DigitRun(JsonScanner):
    """The digits at the end of a JSON text, outside of strings."""

    length: int = 0

    def read(self, text: str) -> None:
        """Read the next chunk of the text."""
        for _, letter in self.outside(text):
            self.length = self.length + 1 if letter in DIGITS else 0


DIGITS = frozenset("0123456789")


@dataclass(frozen=True)
class DigitLimit:
    """A limit on the digits in a row of a number.

    Attributes:
        most: the limit.
        leading: for each token that begins with digits, their number.
        piece: returns the text of a token.
    """

    most: int
    leading: Mapping[int, int]
    piece: Callable[[int], str]

    @cached_property
    def _longest(self) -> int:
        return max(self.leading.values(), default=0)

    def too_long(self, run: DigitRun) -> Sequence[int]:
        """Return the tokens that would exceed the limit. A string has none."""
        if run.in_string or run.length + self._longest <= self.most:
            return ()
        return [token for token, count in self.leading.items() if run.length + count > self.most]


class Grammars:
    """Grammars of JSON schemas over the vocabulary of one model."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, num_ids: int) -> None:
        self._tokenizer = tokenizer
        self._num_ids = num_ids
        self.grammar = lru_cache(maxsize=GRAMMARS_KEPT)(self._make_grammar)
        """Return the grammar of a schema, cached. Raises the same errors as `constraint`."""

    @cached_property
    def _leading_digits(self) -> Mapping[int, int]:
        texts = ((token, self._tokenizer.piece(token)) for token in range(min(self._num_ids, self._tokenizer.num_ids)))
        return {token: len(text) - len(text.lstrip("0123456789")) for token, text in texts if text[:1] in DIGITS}

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return from_tokenizer(self._tokenizer.own, self._num_ids, sorted(self._tokenizer.end_ids))

    def constraint(self, schema: str) -> Constraint:
        """Return a constraint for a JSON schema. The first call takes about a second.

        Raises:
            UsageError: the schema is not valid JSON, not an object, or not supported.
        """
        grammar, max_digits = self.grammar(schema)
        digits = DigitLimit(max_digits, self._leading_digits, self._tokenizer.piece)
        return Constraint(LLMatcher(self._vocabulary, grammar), digits)

    def _make_grammar(self, schema: str) -> tuple[str, int]:
        try:
            form = _checked(json.loads(schema))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"The JSON schema is not valid JSON: {error}.") from error
        if not isinstance(form, dict):
            raise UsageError(f"The JSON schema must be an object, got {type(form).__name__}.")
        if not self._tokenizer.end_ids:
            raise UsageError("The model has no end-of-text token, so it does not support JSON schemas.")
        options = {"whitespace_pattern": WITHIN, "max_digits": MAX_DIGITS, **_options(form)}
        max_digits = options.pop("max_digits")
        form[GRAMMAR_OPTIONS] = options
        value = f"value: %json {json.dumps(form)}"
        grammar = LLMatcher.grammar_from_lark(f"start: /{BEFORE}/ value\n{value}")
        if reason := self._rejection(grammar, LLMatcher.grammar_from_lark(f"start: value\n{value}")):
            raise UsageError(f"The JSON schema is not supported: {reason.rstrip('.')}.")
        return grammar, max_digits

    def _rejection(self, grammar: str, without_space: str) -> str | None:
        """Return why a grammar cannot be used, as far as can be seen before the first token; None if it can."""
        if problem := LLMatcher.validate_grammar(grammar, self._vocabulary):
            reason = _first_line(problem)
            return reason.partition("JSON schema: ")[2] or reason
        trial = LLMatcher(self._vocabulary, without_space)
        bits = allocate_token_bitmask(1, self._num_ids)
        fill_next_token_bitmask(trial, bits, 0)
        can_start = bool(bits.any())
        return _matcher_error(trial) or (None if can_start else STUCK)


def _options(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that a schema sets in place of the defaults.

    Raises:
        UsageError: they are not valid.
    """
    options: Any = form.get(GRAMMAR_OPTIONS, {})
    kinds = {"whitespace_pattern": str, "max_digits": int}
    valid = isinstance(options, dict) and all(type(each) is kinds.get(name) for name, each in options.items())
    if not valid or options.get("max_digits", 1) < 1:
        raise UsageError(
            f"The JSON schema has an invalid {GRAMMAR_OPTIONS}. It may have whitespace_pattern, a regular expression, "
            "and max_digits, a whole number above 0."
        )
    return cast("Mapping[str, Any]", options)


BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""Keys of a schema with a bound of numbers, and the sign with which it is an upper bound."""


ANNOTATIONS = frozenset({"default", "examples"})
"""Keys of a schema that constrain nothing."""


def _checked(value: Any, name: str = "", part: Part = "schema") -> Any:
    """Return the value at the key `name` of a schema, without annotations, to which a reference could lead.

    Raises:
        UsageError: the grammar cannot hold one of its numbers.
    """
    if isinstance(value, list):
        return [_checked(each, name, part) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        dropped = ANNOTATIONS if part == "schema" else ()
        return {key: _checked(each, key, part_at(key, part)) for key, each in items if key not in dropped}
    if type(value) in (int, float) and not _holds(value, BOUNDS.get(name, 0) if part == "schema" else 0):
        raise UsageError(
            f"The JSON schema has {name} {str(value)[:30]}, which the grammar cannot hold. Leave it out, or choose "
            "a number below 2**53."
        )
    return value


def _holds(number: float, sign: int) -> bool:
    """Return whether the grammar holds a number. A bound beyond all of its integers limits nothing.

    llguidance rounds integers to floats, and -2**63 ends the process, as a float too.
    """
    return sign * number >= 2**63 - 1 or (abs(number) < 2**62 and float(number) == number)


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
    words = moved(torch.from_numpy(bits), device).view(len(constraints), width, -1, 1)
    allowed = (words >> torch.arange(32, dtype=torch.int32, device=device) & 1).flatten(2)[..., :vocab_size].bool()
    for row, (constraint, tokens) in enumerate(zip(constraints, drafted, strict=True)):
        for at, ids in enumerate(constraint.too_long(tokens) if constraint is not None else ()):
            if ids:
                shorter = allowed[row, at].clone()
                shorter[list(ids)] = False
                if shorter.any():  # else the schema asks for more digits
                    allowed[row, at] = shorter
    return allowed
