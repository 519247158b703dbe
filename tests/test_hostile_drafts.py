"""Generated requests with drafts that write answers, tags, ends and tool calls everywhere.

No token of an answer may be the draft's alone. The target keeps a record of what it wrote, and of the choices that it
returned in its passes; the checks compare the text with this record, and not with the bookkeeping.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from own_answers import check
from random_judge import RandomJudge
from scripted import PLAIN_TEMPLATE, ScriptedEngine, WordTokenizer
from thinking_families import ASKED, FAMILIES, Family

from stepspec import Pair, Policy, StepSpec
from stepspec.engines.protocol import Generate, Sampling, TokenChunk, Verification, Verify
from stepspec.engines.stops import StopMatcher
from stepspec.loop.families import FAMILIES as POLICY_FAMILIES
from stepspec.loop.request import Request
from stepspec.loop.result import Result

PLAIN = Family("none", PLAIN_TEMPLATE, (), "<|assistant|>", "")
MODELS = {**FAMILIES, "plain": PLAIN, "asked": ASKED}
WORDS = (" one", " two", " so", " the", " answer", " is", " \\", "boxed", "{", "}", "5", "7", "\n\n", "\n\n", "#", ".")
JUDGES: Sequence[dict[str, Any]] = ({"kind": "likelihood", "threshold": -3.0},)
POLICIES: tuple[dict[str, Any], ...] = (
    {"family": "score", "judges": JUDGES},
    {"family": "score", "judges": JUDGES, "salvage": {"min_logprob": -2.0}},
    {"family": "score", "judges": JUDGES, "salvage": {"redraft": True}, "score": {"depth": 4, "draft_answer": True}},
    {"family": "score", "judges": (RandomJudge(share=0.7),), "score": {"depth": 2, "draft_answer": True}},
    {
        "family": "score",
        "judges": ({"kind": "draft-confidence", "threshold": -0.5},),
        "salvage": {},
    },
    {"family": "score", "judges": ({"kind": "exact"},), "salvage": {}, "score": {"depth": 3}},
    {"family": "compare", "judges": (RandomJudge(share=0.8),)},
    {"family": "compare", "judges": (RandomJudge(share=0.8),), "compare": {"depth": 2}},
    {"family": "route"},
    {"family": "route", "route": {"signal": "words", "opening_tokens": 2, "checking_tokens": 3, "doubts": 2}},
    {"family": "alternate"},
)
RELAXED = ({"family": "target", "token": {"drafter": "draft-model", "acceptance": "ratio", "threshold": 0.1}},)


class Recording(ScriptedEngine):
    """A target whose next token follows from the ids before it, and which records what it writes and confirms. Under a
    relaxed rule it writes any ordinary token of the draft now and then."""

    relaxed_share: float
    foreign: Sequence[int]

    def prepare(self, family: Family, seed: int) -> None:
        """Set what it writes: words, and now and then the tokens of its family."""
        tokenizer = self.tokenizer
        self.record: set[tuple[int, int]] = set()
        self.seed, self.words = seed, [id for word in WORDS for id in tokenizer.encode(word)]
        self.rare = [id for token in (*family.special, "<tool_call>") for id in tokenizer.encode(token)]
        self.ends = [id for end in family.ends for id in tokenizer.encode(end)]
        self.headers = [tokenizer.encode(header) for header in HEADERS] if family.thinking == "harmony" else []

    def next_id(self, ids: Sequence[int]) -> int:
        """Return what it writes after some ids."""
        rng = random.Random(hash((self.seed, *ids)))
        tags = self.tokenizer.thinking
        if self.headers and tags is not None and tags.end is not None and tags.end in ids[-12:]:
            at = len(ids) - 1 - [*reversed(ids)].index(tags.end)
            header = random.Random(hash((self.seed, *ids[: at + 1]))).choice(self.headers)
            if [*ids[at + 1 :]] == header[: len(ids) - at - 1] and len(ids) - at - 1 < len(header):
                return header[len(ids) - at - 1]
        kind = rng.random()
        if tags is not None and tags.text:
            for count in range(len(tags.ending) - 1, 0, -1):
                if (*ids[-count:],) == tags.ending[:count] and rng.random() < 0.9:
                    return tags.ending[count]
        if kind < 0.08 and tags is not None:
            return tags.ending[0]
        return rng.choice(self.ends if kind < 0.12 else self.rare if kind < 0.16 and self.rare else self.words)

    def confirm(self, ids: Sequence[int], id: int) -> None:
        """Record that it writes an id after some ids."""
        self.record.add((hash((*ids,)), id))

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        ids = [*call.prompt.since(0), *call.after]
        self._check_room(len(ids) + 1)
        watch = StopMatcher(call.stop, self.tokenizer.piece, self.tokenizer.end_ids)
        rng, chunk, relaxed, end = random.Random(hash((*ids,))), list[int](), list[int](), None
        while end is None:
            id = self.next_id(ids)
            relaxes = not (call.drafting.acceptance.is_exact or self.is_control(id))
            if relaxes and rng.random() < self.relaxed_share:
                id = rng.choice(self.foreign)
                relaxed.append(len(chunk))
            else:
                self.confirm(ids, id)
            ids.append(id)
            chunk.append(id)
            end = watch.feed(id)
            if end is not None or rng.random() < 0.3:
                await asyncio.sleep(0)
                yield TokenChunk(tuple(chunk), end, relaxed=tuple(relaxed))
                chunk, relaxed = [], []

    def is_control(self, id: int) -> bool:
        """Return whether an id is never relaxed, and nothing is in its place."""
        return self.tokenizer.is_special(id) or id in self.tokenizer.end_ids

    async def verify(self, call: Verify) -> Verification:
        ids, choices, logprobs = call.prompt.since(0), list[int](), list[float]()
        self._check_room(len(ids) + len(call.continuation))
        await asyncio.sleep(0)
        for id in call.continuation:
            choices.append(self.next_id(ids))
            self.confirm(ids, choices[-1])
            logprobs.append(-0.1 if choices[-1] == id else -5 * random.Random(hash((*ids, id))).random())
            ids.append(id)
        after = self.next_id(ids)
        self.confirm(ids, after)
        yes = tuple((-0.5,) * len(probe.labels) for probe in call.probes)
        return Verification(tuple(logprobs), tuple(choices), after, yes, (self.words[0],) * len(call.probes))


HEADERS = (
    "<|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant<|channel|>analysis<|message|>",
    "<|start|>assistant<|channel|>commentary<|message|>",
)


class Hostile(ScriptedEngine):
    """A draft that writes what the target would, and in between any token at all."""

    target: Recording
    other: Sequence[int]
    rng: random.Random
    share: float

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        ids, written, end = [*call.prompt.since(0), *call.after], list[int](), None
        watch = StopMatcher(call.stop, self.tokenizer.piece, self.tokenizer.end_ids)
        same = self.target.tokenizer is self.tokenizer
        while end is None:
            honest = same and self.rng.random() < self.share
            id = self.target.next_id(ids) if honest else self.rng.choice(self.other)
            ids.append(id)
            written.append(id)
            end = watch.feed(id)
        await asyncio.sleep(0)
        details = tuple(-self.rng.random() for _ in written)
        entropies = tuple(-2 * each for each in details)
        yield TokenChunk(tuple(written), end, logprobs=details, entropies=entropies)


async def play(seed: int, policies: Sequence[dict[str, Any]]) -> tuple[Result, Request, Recording]:
    """Make a request from a seed under one of the policies."""
    rng = random.Random(seed)
    models = [PLAIN, ASKED] if policies is RELAXED and seed % 2 else [*MODELS.values()]
    family, drafting = rng.choice(models), rng.choice([*MODELS.values()])
    tokenizer = WordTokenizer(PLAIN_TEMPLATE, tags=False) if family is PLAIN else family.tokenizer()
    one_vocabulary = rng.random() < 0.7
    other = tokenizer
    if not one_vocabulary:
        other = WordTokenizer(PLAIN_TEMPLATE, tags=False) if drafting is PLAIN else drafting.tokenizer()
    target, draft = Recording(tokenizer, name="target"), Hostile(other, name="draft")
    target.prepare(family, seed)
    specials = [token for each in MODELS.values() for token in each.special]
    texts = [*WORDS * 2, *specials, "<|end|>", "</think>", "<tool_call>", " the answer is 5", "\\boxed{5}", "#### 5"]
    texts += ["\n", "Answer", ":", ":5", "\nAnswer: 5", "\n\nAnswer:5", ".</think>\n\n"]
    draft.target, draft.rng, draft.share = target, rng, rng.choice((0.3, 0.8, 0.95))
    draft.other = [id for text in texts for id in other.encode(text)]
    target.relaxed_share = 1 - draft.share
    foreign = draft.other if one_vocabulary else target.words
    target.foreign = [id for id in foreign if not target.is_control(id)]
    policy = Policy.model_validate(
        {"version": 1, "summary": "a test", "step": {"max_step_tokens": rng.choice((3, 6, 24))}} | rng.choice(policies)
    )
    found: list[Request] = []
    session = StepSpec(policy=policy, pair=Pair(target, draft, one_vocabulary=one_vocabulary))
    made = session._request  # pyright: ignore[reportPrivateUsage]
    session._request = lambda *given: found.append(made(*given)) or found[-1]  # type: ignore[method-assign]
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
    sampling = Sampling(temperature=rng.choice((0.0, 1.0)), seed=seed)
    options = {"sampling": sampling, "max_tokens": rng.choice((40, 120)), "tools": tools if rng.random() < 0.2 else ()}
    result = await session.generate("How many?", **options)
    return result, found[0], target


def runs(count: int, policies: Sequence[dict[str, Any]]) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(count):
        try:
            kinds[check(*asyncio.run(play(seed, policies)))[0]] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for model in ("thinks", "plain"):
        assert kinds[f"{model}, draft"] > 0, kinds
        assert kinds[f"{model}, target"] > 0, kinds


def test_every_policy_family_is_among_the_runs() -> None:
    speculating = {name for name, each in POLICY_FAMILIES.items() if each.table.speculates}
    assert {tables["family"] for tables in POLICIES} == speculating


@pytest.mark.parametrize("policies", [POLICIES, RELAXED], ids=["steps", "relaxed tokens"])
def test_no_token_of_an_answer_is_the_draft_s_alone(policies: Sequence[dict[str, Any]]) -> None:
    runs(300, policies)


@pytest.mark.soak
@pytest.mark.parametrize("policies", [POLICIES, RELAXED], ids=["steps", "relaxed tokens"])
def test_no_token_of_an_answer_is_the_draft_s_alone_in_many_runs(policies: Sequence[dict[str, Any]]) -> None:
    runs(10_000, policies)
