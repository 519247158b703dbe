"""The Python API with scripted engines: the prompts that a session sends to the models, and its errors."""

import asyncio
import re
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from scripted import Opinion, Reply, ScriptedEngine, WordTokenizer

import stepspec
from stepspec import Pair, Policy, Sampling, StepSpec, SyncStepSpec, load_pair
from stepspec.api import session
from stepspec.api.pairs import EMBEDDED
from stepspec.api.scope import PairScope
from stepspec.client import RemoteStepSpec
from stepspec.errors import ContextError, EngineError, StepSpecError, TargetError, UsageError
from stepspec.loop.judge import Evidence, Judge
from stepspec.loop.result import Done, Event

pytestmark = pytest.mark.anyio

EMBEDDED_QUESTION = "Ann has 3 apples. Ben has 4 more apples than Ann. How many apples has Ben?"
ONE, END, ANSWER = "One two.\n\n", "</think>", "So 9.<|end|>"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def new_pair(max_context: int = 1000) -> Pair:
    """Return models that answer one request: the draft writes a step, and the target writes the answer."""
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, [ANSWER], [ONE, END], name="target", max_context=max_context)
    return Pair(target, ScriptedEngine(tokenizer, [ONE, END], name="draft"))


def asked(pair: Pair) -> str:
    """Return the prompt of the target's first call."""
    assert isinstance(pair.target, ScriptedEngine)
    return pair.target.calls[0].prompt


async def test_a_question_is_answered() -> None:
    pair = new_pair()
    result = await StepSpec(policy="specreason", pair=pair).generate("How many?")
    assert (result.reasoning, result.answer, result.finish_reason) == (ONE, "So 9.", "stop")
    assert asked(pair) == "<|user|>How many?<|end|><|assistant|><think>"
    assert result.num_prompt_tokens == len(pair.target.tokenizer.encode(asked(pair)))


async def test_a_result_is_plain_values() -> None:
    result = await StepSpec(policy="specreason", pair=new_pair()).generate("How many?")
    plain: Any = result.to_dict()
    assert plain["steps"][0]["scores"] == {"rating.specreason": 9.0}
    assert plain["counts"]["committed"] == 10


async def test_the_last_event_carries_the_result() -> None:
    events: list[Event] = [event async for event in StepSpec(policy="specreason", pair=new_pair()).stream("How many?")]
    assert isinstance(events[-1], Done)
    assert [type(event) for event in events].count(Done) == 1


async def test_a_policy_may_be_given_as_an_object() -> None:
    policy = Policy(version=1, summary="a test", family="target")
    pair = new_pair()
    target = ScriptedEngine(WordTokenizer(), [ONE + END + ANSWER])
    result = await StepSpec(policy=policy, pair=Pair(target, pair.draft)).generate("How many?")
    assert result.steps[0].origin == "target"


@pytest.mark.parametrize(
    "question",
    [
        "{question}",
        "{0} {} {x!r:>3}",
        "a } b { c",
        "{{ messages }} {% raw %}",
        "%s %(x)s",
        "Ä → é 😀",
        "\\boxed{1}",
    ],
)
@pytest.mark.parametrize("prompt", ["bare", "boxed", "steps"])
async def test_a_question_reaches_the_model_unchanged(question: str, prompt: str) -> None:
    pair = new_pair()
    await StepSpec(policy="specreason", pair=pair).generate(question, prompt=prompt)
    text = asked(pair).removeprefix("<|user|>")
    assert text.startswith(question)
    assert text.endswith("<|end|><|assistant|><think>")


@pytest.mark.parametrize("question", ["What does </think> mean?", "<|end|>", "<think>"])
async def test_tags_in_a_question_do_not_end_the_thinking_or_the_text(question: str) -> None:
    pair = new_pair()
    result = await StepSpec(policy="specreason", pair=pair).generate(question)
    assert asked(pair) == f"<|user|>{question}<|end|><|assistant|><think>"
    assert (result.reasoning, result.answer, result.finish_reason) == (ONE, "So 9.", "stop")


@pytest.mark.parametrize("question", ["", " ", "\n\n"])
async def test_an_empty_question_is_refused(question: str) -> None:
    with pytest.raises(UsageError, match="question is empty"):
        await StepSpec(policy="specreason", pair=new_pair()).generate(question)


@pytest.mark.parametrize("max_tokens", [0, -1])
async def test_max_tokens_below_1_is_refused(max_tokens: int) -> None:
    with pytest.raises(UsageError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        await StepSpec(policy="specreason", pair=new_pair()).generate("How many?", max_tokens=max_tokens)


async def test_an_unknown_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean 'boxed'"):
        await StepSpec(policy="specreason", pair=new_pair()).generate("How many?", prompt="boxd")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": 10.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
    ],
)
async def test_sampling_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        Sampling(**wrong)


async def test_a_question_longer_than_the_context_is_refused_with_both_lengths() -> None:
    with pytest.raises(ContextError, match=r"The prompt has \d+ tokens, but target has a context of 8\."):
        await StepSpec(policy="specreason", pair=new_pair(max_context=8)).generate("How many are there?")


async def test_a_target_error_carries_the_committed_text() -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, [], [ONE, Opinion(fails=EngineError("gone"))])
    session = StepSpec(policy="specreason", pair=Pair(target, ScriptedEngine(tokenizer, [ONE, END])))
    with pytest.raises(TargetError) as caught:
        await session.generate("How many?")
    assert caught.value.committed == ONE


async def test_closing_a_stream_early_closes_the_running_call() -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, [Reply(ONE, hangs=True)])
    session = StepSpec(policy="target", pair=Pair(target, None))
    async with aclosing(session.stream("How many?")) as events:
        async for _ in events:
            assert target.num_open == 1
            break
    assert target.num_open == 0


async def test_requests_of_one_session_do_not_mix() -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, [ONE + END + ANSWER, "Six." + END + "So 3.<|end|>"])
    session = StepSpec(policy="target", pair=Pair(target, None))
    first, second = await session.generate("How many?"), await session.generate("How many then?")
    assert (first.answer, second.answer) == ("So 9.", "So 3.")
    assert first.counts.committed == 10


async def test_a_conversation_is_answered_with_its_turns_as_the_prompt() -> None:
    pair = new_pair()
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Six."}]
    result = await StepSpec(policy="specreason", pair=pair).generate([*turns, {"role": "user", "content": "Sure?"}])
    assert result.answer == "So 9."
    assert asked(pair) == "<|user|>How many?<|end|><|assistant|>Six.<|end|><|user|>Sure?<|end|><|assistant|><think>"


async def test_a_problem_prompt_is_refused_for_a_conversation() -> None:
    with pytest.raises(UsageError, match="'boxed' applies only to a single question"):
        await StepSpec(policy="specreason", pair=new_pair()).generate(
            [{"role": "user", "content": "x"}], prompt="boxed"
        )


async def test_a_batch_runs_concurrently_and_returns_in_order() -> None:
    target = ScriptedEngine(WordTokenizer(), [Reply(ONE + END + ANSWER, delay_s=0.2), ONE + END + "So 3.<|end|>"])
    started = time.perf_counter()
    first, second = await StepSpec(policy="target", pair=Pair(target, None)).batch(["How many?", "How many then?"])
    assert (first.answer, second.answer) == ("So 9.", "So 3.")
    assert second.times.wall < 0.2 <= first.times.wall
    assert time.perf_counter() - started >= 0.2


async def test_a_question_that_fails_ends_the_batch() -> None:
    target = ScriptedEngine(WordTokenizer(), [Reply(ONE, hangs=True)])
    with pytest.raises(UsageError, match="question is empty"):
        await StepSpec(policy="target", pair=Pair(target, None)).batch(["How many?", " "])
    assert target.num_open == 0


async def test_usage_splits_the_tokens_by_model() -> None:
    result = await StepSpec(policy="specreason", pair=new_pair()).generate("How many?")
    usage, counts = result.usage, result.counts
    assert (usage.prompt_tokens, usage.completion_tokens) == (result.num_prompt_tokens, counts.committed)
    assert usage.draft_tokens + usage.target_tokens == usage.completion_tokens
    assert usage.reasoning_tokens == sum(step.num_tokens for step in result.steps) > 0


async def test_a_notebook_shows_steps_and_answer_with_markup_escaped() -> None:
    target = ScriptedEngine(WordTokenizer(), ["One <b>two.\n\n" + END + "So <script>9.<|end|>"])
    result = await StepSpec(policy="target", pair=Pair(target, None)).generate("How many?")
    shown = result._repr_html_()
    assert "One &lt;b&gt;two." in shown
    assert "So &lt;script&gt;9." in shown
    assert 'title="target, ' in shown
    assert "<b>" not in shown
    assert "<script>" not in shown


# The synchronous API


def test_the_synchronous_api_gives_the_same_results() -> None:
    with SyncStepSpec(policy="specreason", pair=new_pair()) as spec:
        result = spec.generate("How many?")
    assert (result.reasoning, result.answer) == (ONE, "So 9.")
    with SyncStepSpec(policy="specreason", pair=new_pair()) as spec:
        events = list(spec.stream("How many?"))
    assert isinstance(events[-1], Done)
    assert events[-1].result.steps == result.steps
    target = ScriptedEngine(WordTokenizer(), [ONE + END + ANSWER, ONE + END + "So 3.<|end|>"])
    with SyncStepSpec(policy="target", pair=Pair(target, None)) as spec:
        assert [each.answer for each in spec.batch(["How many?", "How many then?"])] == ["So 9.", "So 3."]


async def test_the_synchronous_api_works_inside_a_running_loop() -> None:
    with SyncStepSpec(policy="specreason", pair=new_pair()) as spec:
        assert spec.generate("How many?").answer == "So 9."


def test_closing_a_synchronous_stream_early_closes_the_running_call() -> None:
    target = ScriptedEngine(WordTokenizer(), [Reply(ONE, hangs=True)])
    with SyncStepSpec(policy="target", pair=Pair(target, None)) as spec:
        events = spec.stream("How many?")
        next(events)
        assert target.num_open == 1
        events.close()
        deadline = time.monotonic() + 10
        while target.num_open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert target.num_open == 0


def test_the_synchronous_api_raises_the_errors_of_the_request() -> None:
    spec = SyncStepSpec(policy="specreason", pair=new_pair())
    with pytest.raises(UsageError, match="question is empty"):
        spec.generate(" ")
    with pytest.raises(UsageError, match="question is empty"):
        list(spec.stream(" "))
    spec.close()
    spec.close()
    for ask in (spec.generate, spec.batch, lambda question: list(spec.stream(question))):
        with pytest.raises(UsageError, match="was closed"):
            ask("How many?")


# Models


async def test_a_closed_session_is_refused_in_every_api() -> None:
    spec, remote = StepSpec(policy="specreason", pair=new_pair()), RemoteStepSpec("http://127.0.0.1:9/v1", retries=0)
    for each in (spec, remote):
        async with each:
            pass
        with pytest.raises(UsageError, match=r"The session was closed\. Open a new one\."):
            await each.generate("How many?")
    assert repr(spec).endswith("policy specreason, closed>")


async def test_a_request_may_choose_another_policy() -> None:
    pair = load_pair(notes=False)
    spec = StepSpec(policy="specreason", pair=pair)
    asked: list[str | None] = ["target", "target", None, "specreason"]
    results = [await spec.generate("How many?", policy=name, max_tokens=20) for name in asked]
    assert [each.policy for each in results] == ["target", "target", "specreason", "specreason"]
    assert (results[0].counts.drafted, results[0].answer) == (0, results[1].answer)
    with SyncStepSpec(policy="specreason", pair=pair) as sync:
        assert sync.generate("How many?", policy="target", max_tokens=20).reasoning == results[0].reasoning
    for name, message in (("targett", "Did you mean 'target'"), ("no/such.toml", "no policy file")):
        with pytest.raises(UsageError, match=message):
            await spec.generate("How many?", policy=name)
    with pytest.raises(UsageError, match="needs a draft"):
        await StepSpec(policy="target", pair=Pair(pair.target, None)).generate("How many?", policy="specreason")
    await pair.aclose()


async def test_the_policy_that_was_used_last_keeps_what_it_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_OTHERS", 2)
    spec = StepSpec(policy="specreason", pair=new_pair())
    first = await spec._under("target")
    for policy in ("draft", "target", "two-level"):
        assert (await spec._under(policy) is first) is (policy == "target")
    assert await spec._under("target") is first


async def test_the_time_that_another_policy_takes_to_load_counts_as_time_of_the_request() -> None:
    class Slow(StepSpec):
        async def _under(self, policy: str) -> StepSpec:
            await asyncio.sleep(0.05)
            return await super()._under(policy)

    spec = Slow(policy="specreason", pair=new_pair())
    assert (await spec.prepare("How many?", policy="target")).seconds >= 0.05


async def test_a_session_and_a_result_are_printed_as_one_short_paragraph() -> None:
    spec = StepSpec(policy="specreason", pair=new_pair())
    assert repr(spec) == "<StepSpec: target with the draft draft, policy specreason>"
    result = await spec.generate("How many?")
    for text in (repr(spec), str(result), str(replace(result, answer="long " * 1000, note="A note."))):
        assert "\n" not in text
        assert len(text) < 600
    assert str(result).startswith("So 9. (")
    assert "10 tokens" in str(result)


class Broken(Judge):
    """Fails at every step."""

    asks_target = False
    kind: str = "broken"

    async def score(self, evidence: Evidence) -> float | None:
        raise RuntimeError("out of order")

    def decide(self, score: float) -> Any: ...


async def test_a_judge_that_raises_shows_in_the_result(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(version=1, summary="a test", family="score", judges=(Broken(),))
    async with StepSpec(policy=policy) as spec:
        note = (await spec.generate(EMBEDDED_QUESTION, max_tokens=40)).note
    assert note is not None
    count = re.search(r"The judge broken failed at (\d+) steps and did not accept them\.", note)
    assert count
    assert int(count[1]) > 0
    logged = [each.getMessage() for each in caplog.records]
    assert logged == ["The judge broken failed and did not accept the step: RuntimeError: out of order"]


async def test_a_session_does_not_close_a_given_pair() -> None:
    pair = new_pair()
    async with StepSpec(policy="specreason", pair=pair):
        pass
    assert isinstance(pair.target, ScriptedEngine)
    assert not pair.target.closed


async def test_a_pair_closes_both_models() -> None:
    pair = new_pair()
    await pair.aclose()
    assert isinstance(pair.target, ScriptedEngine)
    assert isinstance(pair.draft, ScriptedEngine)
    assert pair.target.closed
    assert pair.draft.closed


def test_different_models_have_different_hashes() -> None:
    pair = new_pair()
    assert pair.hash == new_pair().hash
    assert len({pair.hash, Pair(pair.target, None).hash, Pair(pair.target, pair.target).hash}) == 3


@pytest.mark.parametrize("policy", ["draft", "token", "specreason", "two-level"])
def test_a_policy_that_needs_a_draft_is_refused_without_one(policy: str) -> None:
    with pytest.raises(UsageError, match=r"needs a draft model.*--draft"):
        StepSpec(policy=policy, pair=Pair(new_pair().target, None))
    with pytest.raises(UsageError, match=r"needs a draft model.*--draft"):
        StepSpec("torch:nowhere", policy=policy)


def test_the_target_alone_needs_no_draft() -> None:
    assert StepSpec(policy="target", pair=Pair(new_pair().target, None)).pair.draft is None


def test_an_unknown_policy_is_refused_before_any_model_is_loaded() -> None:
    with pytest.raises(UsageError, match="no policy 'specreson'"):
        StepSpec("torch:nowhere", "torch:nowhere", policy="specreson")


@pytest.mark.parametrize("spec", ["", "nowhere", "torch:", ":nowhere", "vlm:nowhere", "Torch:nowhere"])
def test_a_spec_string_that_names_no_model_is_refused(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_pair(spec, "torch:nowhere")
    assert "torch" in str(caught.value)


def test_an_unknown_engine_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no engine kind 'torhc'\. Did you mean 'torch'\? Known: .*torch"):
        load_pair("torhc:nowhere", "torch:nowhere")


def test_a_draft_without_a_target_is_refused() -> None:
    with pytest.raises(UsageError, match="draft was named without a target"):
        load_pair(draft="torch:nowhere")


def test_a_named_pair_must_exist_and_excludes_other_models() -> None:
    with pytest.raises(UsageError, match=r"no pair 'embeded'\. Did you mean 'embedded'"):
        load_pair(pair="embeded")
    with pytest.raises(UsageError, match="has its own target and draft"):
        load_pair("torch:nowhere", pair="embedded")


async def test_the_embedded_pair_has_a_name() -> None:
    async with StepSpec(pair="embedded", policy="target") as spec:
        assert (spec.pair.target.name, spec.pair.scope) == ("embedded target", PairScope.load(EMBEDDED))


def test_a_usage_error_is_a_stepspec_error() -> None:
    assert issubclass(UsageError, StepSpecError)


def test_a_name_that_is_gone_is_no_attribute_and_says_what_takes_its_place() -> None:
    assert not hasattr(stepspec, "ToolCallDelta")
    with pytest.raises(AttributeError, match="as ToolCalled"):
        getattr(stepspec, "ToolCallDelta")  # noqa: B009 (for type checkers, it does not exist)
