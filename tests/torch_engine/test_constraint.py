"""Text constrained by a schema is drafted and verified like other text, and drafting keeps its distribution."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from stepspec import Pair, Sampling, StepSpec, load_pair
from stepspec.chat.tools import Toolbox, schema_text
from stepspec.engines.hugging_face import load_tokenizer
from stepspec.engines.protocol import (
    DrafterName,
    Drafting,
    Generate,
    Stop,
    TokenBuffer,
    TokenChunk,
    collect,
)
from stepspec.engines.torch_engine.constraint import Grammars, allowed_tokens
from stepspec.errors import UsageError
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

PROMPT = "<|user|>Ann has 12 apples. Ben has 5 more. How many has Ben?<|end|><|assistant|><think></think>"
FORM = {"type": "array", "items": {"enum": ["five", "six", 12]}, "minItems": 2, "maxItems": 4}
STOP = Stop(300)
GREEDY = Sampling()


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    loaded = load_pair()
    yield loaded
    await loaded.aclose()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def write(
    pair: Pair, form: Any = FORM, drafter: DrafterName = "none", sampling: Sampling = GREEDY, stop: Stop = STOP
) -> tuple[str, TokenChunk]:
    """Return a text with that schema, without its end token, and the chunk with its costs."""
    tokenizer = pair.target.tokenizer
    buffer = TokenBuffer(tokenizer.encode(PROMPT))
    drafting = Drafting(drafter, 4 if drafter != "none" else None)
    written = pair.target.generate(Generate(buffer, sampling, stop, drafting, json_schema=json.dumps(form)))
    chunk = await collect(written)
    ids = chunk.ids[:-1] if chunk.end == "token" else chunk.ids
    return tokenizer.decode(ids), chunk


def fits(value: Any) -> bool:
    """Return whether the value conforms to `FORM`."""
    return isinstance(value, list) and 2 <= len(value) <= 4 and all(each in FORM["items"]["enum"] for each in value)  # type: ignore[index]


def never(value: Any) -> bool:
    """No text conforms to the schema."""
    return False


def isinstance_of_list(value: Any) -> bool:
    return isinstance(value, list)


def matching(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def nested(depth: int) -> Any:
    """Return a schema of nested lists."""
    form: Any = {"type": "array", "minItems": 1}
    for _ in range(depth):
        form = {"type": "array", "items": form, "minItems": 1}
    return form


@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup", "suffix"])
async def test_greedy_text_is_the_same_with_every_drafter(pair: Pair, drafter: DrafterName) -> None:
    alone, _ = await write(pair)
    assert fits(json.loads(alone))
    text, chunk = await write(pair, drafter=drafter)
    assert text == alone
    assert chunk.end == "token"


async def test_drafted_tokens_are_accepted_inside_a_schema(pair: Pair) -> None:
    await write(pair, drafter="suffix")
    _, chunk = await write(pair, drafter="suffix")  # the suffix drafter knows this text from the first call
    assert chunk.drafted > 0
    assert chunk.accepted > 0


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
async def test_sampled_text_follows_its_schema(pair: Pair, drafter: DrafterName) -> None:
    texts = [await write(pair, drafter=drafter, sampling=Sampling(1.5, seed=seed)) for seed in range(4)]
    assert all(chunk.end == "token" and fits(json.loads(text)) for text, chunk in texts)
    assert len({text for text, _ in texts}) > 1


@pytest.mark.parametrize("num_texts", [150, pytest.param(300, marks=pytest.mark.soak)])
async def test_drafting_does_not_change_the_distribution(pair: Pair, num_texts: int) -> None:
    """A chi-square test compares samples with and without drafting. It would detect a bias."""
    form = {"enum": ["five", "six", "ten", "more", "Ann"]}

    async def sample(drafter: DrafterName, first_seed: int) -> Counter[str]:
        seeds = range(first_seed, first_seed + num_texts)
        texts = await asyncio.gather(*(write(pair, form, drafter, Sampling(2.0, seed=seed)) for seed in seeds))
        return Counter(json.loads(text) for text, _ in texts)

    alone, drafted = await sample("none", 0), await sample("draft-model", 10_000)
    kinds = sorted({*alone, *drafted})
    assert len(kinds) > 1
    assert chi2_contingency([[each[kind] for kind in kinds] for each in (alone, drafted)]).pvalue > 1e-4


async def test_a_text_without_a_schema_in_the_same_rounds_is_unchanged(pair: Pair) -> None:
    tokenizer = pair.target.tokenizer

    async def free() -> tuple[int, ...]:
        buffer = TokenBuffer(tokenizer.encode(PROMPT))
        return (await collect(pair.target.generate(Generate(buffer, Sampling(), STOP, Drafting("draft-model", 4))))).ids

    alone, constrained = await free(), await write(pair, drafter="draft-model")
    together = await asyncio.gather(free(), write(pair, drafter="draft-model"), free())
    assert together == [alone, (constrained[0], together[1][1]), alone]


async def test_max_tokens_cuts_a_constrained_text_off(pair: Pair) -> None:
    text, chunk = await write(pair, stop=Stop(3))
    assert chunk.end == "length"
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(text)


ONE = {"enum": [1]}
REFERRING: list[dict[str, Any]] = [  # forms of one schema: an object with p, which is the integer 1
    {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": ONE}},
    {"properties": {"p": {"$ref": "#/definitions/P"}}, "definitions": {"P": ONE}},
    {"properties": {"p": {"$ref": "#/definitions/Q"}}, "definitions": {"P": ONE, "Q": {"$ref": "#/definitions/P"}}},
    {"properties": {"p": {"anyOf": [ONE, {"$ref": "#/properties/p/anyOf/0"}]}}},
    {"properties": {"p": {"$ref": "#/properties/q/items"}, "q": {"type": "array", "items": ONE, "maxItems": 0}}},
    {
        "properties": {"p": {"$ref": "#/$defs/default"}},
        "$defs": {"default": {"allOf": [{"$ref": "#/$defs/const"}]}, "const": ONE},
    },
    {"properties": {"p": ONE, "self": {"anyOf": [{"$ref": "#"}, {"const": None}]}}},
]


@pytest.mark.parametrize("more", REFERRING, ids=json.dumps)
async def test_references_in_parameters_and_beside_them_resolve(pair: Pair, more: dict[str, Any]) -> None:
    form = {"type": "object", "required": ["p"], "additionalProperties": False, **more}
    other = {"type": "object", "required": ["p"], "additionalProperties": False, **REFERRING[1]}
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("f", form), ("g", other))]

    def takes(schema: str, value: Any) -> bool:
        matcher = grammars.constraint(schema).matcher
        ids = grammars._tokenizer.encode_text(json.dumps(value))  # pyright: ignore[reportPrivateUsage]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def call(name: str, value: int) -> Any:
        return [{"name": name, "arguments": {"p": value}}]

    grammars: Grammars = pair.target._grammars  # type: ignore[attr-defined]
    for choice, allowed in (("required", "fg"), ("f", "f")):
        schema = schema_text(Toolbox.checked(tools, choice).schema())
        assert [takes(schema, call(name, 1)) for name in "fg"] == [name in allowed for name in "fg"]
        assert not any(takes(schema, call(name, 2)) for name in "fg")
    beside = schema_text(form, Toolbox.checked(tools))
    assert [takes(beside, each) for each in ({"p": 1}, {"p": 2}, call("g", 1))] == [True, False, True]


NINES = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
@pytest.mark.parametrize(("likes", "options", "most"), [("9", {}, 20), ("9.", {}, 20), ("9e.", {"max_digits": 3}, 3)])
async def test_a_number_ends_at_its_limit_of_digits(
    pair: Pair, likes: str, options: dict[str, int], most: int, drafter: DrafterName
) -> None:
    ids = [pair.target.tokenizer.encode(letter)[0] for letter in likes]
    bias = Sampling(logit_bias=tuple((id, 100.0 - 20 * rank) for rank, id in enumerate(ids)))
    text, chunk = await write(pair, {**NINES, "x-guidance": options}, drafter, bias)
    assert chunk.end == "token"
    (number,) = re.findall(r'"n":\s*([0-9.eE+-]+)', text)
    assert max(map(len, re.findall(r"\d+", number))) == most


async def test_a_schema_that_asks_for_more_digits_gets_them_and_strings_have_no_limit(pair: Pair) -> None:
    for value in (10**18, "5" * 30, ["7" * 9, 1234567]):
        text, _ = await write(pair, {"const": value, "x-guidance": {"max_digits": 4}})
        assert json.loads(text) == value


async def test_white_space_is_limited_unless_the_schema_says_otherwise(pair: Pair) -> None:
    spaces = Sampling(logit_bias=((pair.target.tokenizer.encode(" ")[0], 100.0),))
    text, chunk = await write(pair, FORM, sampling=spaces, stop=Stop(200))
    assert chunk.end == "token"
    assert max(map(len, re.findall(" +", text))) == 16
    _, chunk = await write(pair, {**FORM, "x-guidance": {"whitespace_pattern": " *"}}, sampling=spaces, stop=Stop(200))
    assert chunk.end == "length"


BIG = 10**300


@pytest.mark.parametrize(
    "form",
    [
        {"type": "integer", "minimum": BIG},
        {"type": "integer", "minimum": BIG, "maximum": 10 * BIG},
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "exclusiveMaximum": -BIG, "exclusiveMinimum": -10 * BIG},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 2**62 + 1}]}},
        {"type": "number", "minimum": 1e300},
        {"enum": [{"a": [int("7" * 30)]}, None]},
        {"const": 2**53 + 1},
        {"const": -(2**63)},
        {"type": "integer", "minimum": -(2**63) - 5, "maximum": -(2**63)},
        {"type": "array", "items": {}, "minItems": BIG},
        {"type": "string", "maxLength": BIG},
        {"properties": {"default": {"const": -(2**63)}}},
        {"const": {"default": -(2**63)}},
        {"const": {"minimum": -(2**63)}},
        {"type": "integer", "const": -(2.0**63)},
        {"$ref": "#/default", "default": {"const": -(2**63)}},
        {"x-guidance": {"max_digits": 0}},
        {"x-guidance": {"lenient": True}},
    ],
    ids=lambda form: json.dumps(form)[:60],
)
async def test_what_the_grammar_cannot_hold_is_rejected(pair: Pair, form: Any) -> None:
    with pytest.raises(UsageError, match="The JSON schema "):
        await pair.target.check_schema(json.dumps(form))


@pytest.mark.parametrize("form", [{"maximum": 2**64 - 1, "minimum": 0}, {"minimum": -(2**53)}, {"maximum": 2**60}])
async def test_bounds_that_the_grammar_holds_are_taken(pair: Pair, form: Any) -> None:
    await pair.target.check_schema(json.dumps({"type": "integer", "default": -(2**63), **form}))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"type": "string", "pattern": "(?=a)b"}, "is not supported"),
        ([], "must be an object"),
    ],
)
async def test_an_invalid_schema_is_rejected(pair: Pair, form: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        await write(pair, form)


A_TO_B = "((a{1,100}){1,100}){1,100}b"
FEW = "^(a{1,3}){1,3}b$"
HOSTILE: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "nothing but itself": ({"$ref": "#"}, never),
    "two that are each other": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        never,
    ),
    "itself without end": (
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"], "additionalProperties": False},
        never,
    ),
    "itself or a number": ({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, lambda value: isinstance(value, int)),
    "a pattern of too many states": ({"type": "string", "pattern": f"^{A_TO_B}$"}, matching(A_TO_B)),
    "one inside a list": ({"type": "array", "items": {"type": "string", "pattern": f"^{A_TO_B}$"}}, isinstance_of_list),
    "a pattern of few states": ({"type": "string", "pattern": FEW}, matching(FEW)),
    "a long list": ({"type": "array", "items": {"const": "a"}, "minItems": 5000}, never),
    "many names": (
        {"type": "object", "properties": {f"a{n}": {"const": 1} for n in range(300)}, "additionalProperties": False},
        lambda value: isinstance(value, dict),
    ),
    "no type": ({"type": []}, never),
    "nested deeply": (nested(300), never),
}


async def test_a_finished_text_conforms_to_its_schema(pair: Pair) -> None:
    """Otherwise the schema is rejected, the text is cut off, or the call fails, regardless of what the model likes."""
    likes_a = tuple((id, 30.0) for id in range(200) if pair.target.tokenizer.piece(id) in ("a", '"a', "aa"))

    async def outcome(kind: str, drafter: DrafterName, sampling: Sampling) -> str:
        form, fits_form = HOSTILE[kind]
        try:
            text, chunk = await write(pair, form, drafter, sampling, Stop(40))
        except UsageError as error:
            failure = error
        else:
            failure = None
        if failure is not None:
            assert re.fullmatch(".*JSON schema.*", str(failure)), "the message is not one line about the schema"
            return type(failure).__name__
        assert chunk.end == "length" or fits_form(json.loads(text)), kind
        return str(chunk.end)

    samplings = [GREEDY, Sampling(logit_bias=likes_a), Sampling(1.5, seed=1)]
    drafters: list[DrafterName] = ["none", "draft-model"]
    outcomes = await asyncio.gather(*(outcome(*each) for each in product(HOSTILE, drafters, samplings)))
    assert set(outcomes) == {"UsageError", "length", "token"}


async def test_a_grammar_error_fails_only_its_own_call(pair: Pair) -> None:
    """Other calls in the same rounds continue."""
    likes_a = Sampling(logit_bias=((pair.target.tokenizer.encode("a")[0], 30.0),))
    hostile = write(pair, HOSTILE["a pattern of too many states"][0], sampling=likes_a)
    alone = await write(pair)
    failed, together = await asyncio.gather(hostile, write(pair), return_exceptions=True)
    assert isinstance(failed, UsageError)
    assert re.match(r"The JSON schema cannot be followed: lexer error.* Simplify it\.", str(failed))
    assert not isinstance(together, BaseException)
    assert together[0] == alone[0]


async def test_an_invalid_schema_is_rejected_before_the_reasoning(pair: Pair) -> None:
    with pytest.raises(UsageError, match="Invalid type"):
        await anext(StepSpec(pair=pair).stream("How many?", json_schema={"type": "objekt"}))


async def test_a_schema_that_is_not_json_is_rejected(pair: Pair) -> None:
    buffer = TokenBuffer(pair.target.tokenizer.encode(PROMPT))
    with pytest.raises(UsageError, match="not valid JSON"):
        await collect(pair.target.generate(Generate(buffer, Sampling(), STOP, json_schema="{")))


# Masks.


def test_masks_give_the_tokens_allowed_next_and_after_each_drafted_token() -> None:
    tokenizer = load_tokenizer(str(WEIGHTS / "target"))
    grammars = Grammars(tokenizer, 1024)
    drafted = tokenizer.encode('{"a": 1')
    constraint = grammars.constraint('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    allowed = allowed_tokens([None, constraint], [drafted, drafted], 1024, torch.device("cpu"))
    assert allowed.shape == (2, len(drafted) + 1, 1024)
    assert allowed[0].all()
    for position, id in enumerate(drafted):
        assert allowed[1, position, id]
        assert not allowed[1, position, next(iter(tokenizer.end_ids))]
    assert not allowed[1, 0, tokenizer.encode("1")[0]]
    assert allowed[1, -1, tokenizer.encode("}")[0]]
    assert allowed[1, -1, tokenizer.encode("2")[0]]
    again = allowed_tokens([constraint], [drafted[:0]], 1024, torch.device("cpu"))
    assert torch.equal(again[0, 0], allowed[1, 0])  # the first call leaves the state of the constraint unchanged


def test_after_a_complete_text_only_an_end_token_is_allowed() -> None:
    tokenizer = load_tokenizer(str(WEIGHTS / "target"))
    constraint = Grammars(tokenizer, 1024).constraint('{"type": "boolean"}')
    constraint.consume(tokenizer.encode("true"))
    allowed = allowed_tokens([constraint], [[]], 1024, torch.device("cpu"))
    assert allowed[0, 0].nonzero().flatten().tolist() == sorted(tokenizer.end_ids)
