"""Request options with scripted engines: stop strings, thinking budgets, deadlines, schemas and tools."""

import asyncio
import json
import time
from typing import Any

import pytest
from following import THOUGHTS, asked_of, following_pair
from scripted import Opinion, Reply, ScriptedEngine, WordTokenizer

from stepspec import Pair, Policy, Result, StepSpec, TargetError
from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.engines.protocol import EVERYTHING
from stepspec.errors import EngineError, UsageError
from stepspec.loop.families import FAMILIES
from stepspec.loop.result import Done
from stepspec.loop.step import StepCommitted

pytestmark = pytest.mark.anyio

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
ONE, TWO = "One two.\n\n", "Three four.\n\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pair_of(
    replies: list[Any],
    opinions: list[Any] | None = None,
    draft_replies: list[Any] | None = None,
    *,
    tags: bool = True,
    **settings: Any,
) -> Pair:
    tokenizer = WordTokenizer(tags=tags)
    target = ScriptedEngine(tokenizer, replies, opinions or [], name="target", **settings)
    return Pair(target, ScriptedEngine(tokenizer, draft_replies or [], name="draft"))


async def ask(pair: Pair, policy: str | Policy = "specreason", question: str = "How many?", **options: Any) -> Result:
    """Return the result, and check its counts."""
    result = await StepSpec(policy=policy, pair=pair).generate(question, **options)
    result.counts.check()
    return result


def calls(pair: Pair) -> list[Any]:
    """Return the target's `generate` calls."""
    assert isinstance(pair.target, ScriptedEngine)
    return [call for call in pair.target.calls if call.verb == "generate"]


# Stop strings.


async def test_a_stop_string_ends_the_answer_and_not_the_thinking() -> None:
    pair = pair_of(["So 9. Done.<|end|>"], [ONE, "</think>"], [ONE, "</think>"])
    result = await ask(pair, stop=["two", " Done"])
    assert (result.reasoning, result.answer, result.finish_reason) == (ONE, "So 9.", "stop")


async def test_a_stop_string_over_several_chunks_is_held_back() -> None:
    pair = pair_of([Reply("a b c d<|end|>", chunk_size=1)])
    spec = StepSpec(policy="target", pair=pair_of([Reply("</think>a b c d e<|end|>", chunk_size=1)]))
    deltas = [event.text async for event in spec.stream("How many?", stop=[" c d"]) if isinstance(event, AnswerDelta)]
    assert "".join(deltas) == "a b"
    assert calls(pair) == []


async def test_without_separate_thinking_a_stop_string_ends_the_steps() -> None:
    pair = pair_of([], [ONE, TWO], [ONE, TWO], tags=False)
    result = await ask(pair, stop=["four"])
    assert (result.answer, result.finish_reason, result.limit) == (ONE + "Three ", "stop", None)
    assert [step.text for step in result.steps] == [ONE, TWO]


@pytest.mark.parametrize("relaxed", [(), (5,)], ids=["a step", "a step that is held for the next one"])
async def test_a_stop_string_ends_relaxed_steps(relaxed: tuple[int, ...]) -> None:
    """The call may have written further steps by then."""
    rule = {"drafter": "draft-model", "num_tokens": 3, "acceptance": "ratio", "threshold": 0.1}
    policy = Policy.model_validate({"version": 1, "summary": "a test", "family": "target", "token": rule})
    pair = pair_of([Reply(ONE + TWO + ONE + TWO + ONE + "<|end|>", relaxed=relaxed)], tags=False)
    result = await ask(pair, policy, stop=["four"])
    assert (result.answer, result.finish_reason) == (ONE + "Three ", "stop")
    assert [step.text for step in result.steps] == [ONE, TWO]


async def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        await ask(pair_of([]), stop=["a", ""])


# Thinking budgets.


async def test_after_its_budget_the_thinking_is_ended_and_the_target_answers() -> None:
    pair = pair_of(["So 9.<|end|>"], [ONE], [ONE])
    result = await ask(pair, max_thinking_tokens=4)
    assert (result.reasoning, result.answer) == (ONE, "So 9.")
    assert (result.finish_reason, result.limit) == ("stop", "max_thinking_tokens")
    assert calls(pair)[0].prompt.endswith("<think>One two.\n\n</think>")
    assert result.usage.reasoning_tokens == 4
    assert result.counts.forced == 1 + 5  # the tag, and the answer with its end


async def test_a_step_is_cut_where_the_budget_ends() -> None:
    pair = pair_of(["So 9.<|end|>"], ["One two"], ["One two.\n\n"])
    result = await ask(pair, max_thinking_tokens=2)
    assert (result.reasoning, result.usage.reasoning_tokens) == ("One two", 2)


@pytest.mark.parametrize("policy", ["specreason", "target"])
async def test_with_a_thinking_budget_of_zero_there_is_only_an_answer(policy: str) -> None:
    result = await ask(pair_of(["So 9.<|end|>"]), policy, max_thinking_tokens=0)
    assert (result.reasoning, result.answer, result.limit) == ("", "So 9.", "max_thinking_tokens")


async def test_thinking_that_ends_earlier_is_not_cut() -> None:
    result = await ask(pair_of(["One</think>", "So 9.<|end|>"]), "target", max_thinking_tokens=50)
    assert (result.reasoning, result.answer, result.limit) == ("One", "So 9.", None)


async def test_max_tokens_takes_precedence_over_the_thinking_budget() -> None:
    result = await ask(pair_of(["One two three four five six."]), "target", max_thinking_tokens=50, max_tokens=3)
    assert (result.answer, result.finish_reason, result.limit) == ("", "length", "max_tokens")


async def test_a_thinking_budget_is_refused_without_separate_thinking() -> None:
    with pytest.raises(UsageError, match="does not separate thinking from its answer"):
        await ask(pair_of([], tags=False), max_thinking_tokens=5)
    with pytest.raises(UsageError, match="at least 0 \\(no thinking\\)"):
        await ask(pair_of([]), max_thinking_tokens=-1)


# Deadlines.


async def test_after_its_seconds_the_thinking_is_ended_and_the_target_answers() -> None:
    slow = [Reply(ONE, delay_s=0.06), Reply(TWO, delay_s=60.0)]
    result = await ask(pair_of(["So 9.<|end|>"], [ONE], slow), max_thinking_s=0.2)
    assert (result.reasoning, result.answer) == (ONE, "So 9.")
    assert (result.finish_reason, result.limit) == ("stop", "max_thinking_s")


@pytest.mark.parametrize(("limit", "answer"), [("max_thinking_s", "So 9."), ("deadline_s", "")])
async def test_the_limits_of_time_count_the_time_in_a_queue(limit: str, answer: str) -> None:
    pair = pair_of([Reply(ONE, delay_s=60.0), "So 9.<|end|>"])
    request = await StepSpec(policy="target", pair=pair).prepare("How many?", **{limit: 10.0})  # type: ignore[arg-type]
    events = [event async for event in request.stream(queue_s=9.9)]
    assert isinstance(done := events[-1], Done)
    assert done.result.times.queue == 9.9 <= done.result.times.wall < 19
    assert (done.result.answer, done.result.limit) == (answer, limit.removesuffix("_s") if not answer else limit)


@pytest.mark.parametrize("limit", ["max_thinking_s", "deadline_s"])
async def test_a_draft_that_a_deadline_cuts_short_is_not_taken_for_a_failing_one(limit: str) -> None:
    pair = pair_of(["So 9.<|end|>"], [], [Reply(ONE, delay_s=60.0)])
    await ask(pair, **{limit: 0.05})
    assert pair.breaker.allows()


@pytest.mark.parametrize("policy", ["target", "specreason"])
async def test_the_target_s_text_up_to_the_end_of_its_time_is_kept(policy: str) -> None:
    replies = [Reply("One two", chunk_size=1, hangs=True), "So 9.<|end|>"]
    pair = pair_of(replies, [Opinion(rating="0")], ["Five.\n\n"])
    result = await ask(pair, policy, max_thinking_s=0.1)
    assert (result.reasoning, result.answer, result.limit) == ("One two", "So 9.", "max_thinking_s")
    assert pair.target.num_open == 0  # type: ignore[attr-defined]


async def test_the_answer_is_not_cut_by_the_time_for_the_thinking() -> None:
    pair = pair_of(["One</think>", Reply("So 9.<|end|>", delay_s=0.1)])
    result = await ask(pair, "target", max_thinking_s=0.05)
    assert (result.answer, result.finish_reason, result.limit) == ("So 9.", "stop", None)


@pytest.mark.parametrize(("name", "limit"), [("deadline_s", "deadline"), ("max_thinking_s", "max_thinking_s")])
async def test_without_separate_thinking_both_limits_of_time_end_the_text(name: str, limit: str) -> None:
    pair = pair_of([Reply("One two", chunk_size=1, hangs=True)], tags=False)
    result = await ask(pair, "target", **{name: 0.05})
    assert (result.answer, result.finish_reason, result.limit) == ("One two", "length", limit)


async def test_the_deadline_also_ends_a_wait_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.loop.record.MAX_UNREAD", 2)
    pair = pair_of([Reply(50 * ONE, chunk_size=1, hangs=True)])
    async for event in StepSpec(policy="target", pair=pair).stream("How many?", deadline_s=0.1):
        if isinstance(event, Done):
            assert (event.result.limit, event.result.times.wall < 0.4) == ("deadline", True)
        elif event.step.index == 0:  # type: ignore[union-attr]
            await asyncio.sleep(0.5)


@pytest.mark.parametrize("name", ["deadline_s", "max_thinking_s"])
async def test_no_time_at_all_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} must be above 0"):
        await ask(pair_of([]), **{name: 0})


HANG = Reply(hangs=True)
STALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    # The models' scripts with options, and the thinking and the answer at the deadline.
    "the prompt": ({"replies": [HANG]}, "", ""),
    "the thinking": ({"replies": [Reply("One", chunk_size=1, hangs=True)]}, "One", ""),
    "a step of the draft": ({"draft_replies": [ONE, HANG], "opinions": [ONE]}, ONE, ""),
    "judging": ({"draft_replies": [ONE, TWO], "opinions": [ONE, Opinion(hangs=True)]}, ONE, ""),
    "a step again": ({"replies": [HANG], "draft_replies": [ONE], "opinions": [Opinion(rating="0")]}, "", ""),
    "the answer": ({"replies": [Reply("One</think>So", chunk_size=1, hangs=True)]}, "One", "So"),
    "JSON": (
        {"replies": ["One</think>", Reply('{"n"', chunk_size=1, hangs=True)], "json_schema": SCHEMA},
        "One",
        '{"n"',
    ),
    "a forced call": (
        {
            "replies": ["One</think>", Reply('[{"name": "add", "arguments": {"a"', chunk_size=1, hangs=True)],
            "tools": [ADD],
            "tool_choice": "required",
        },
        "One",
        "",
    ),
    "a call": ({"replies": [Reply(f"One</think>{CALL[:-14]}", chunk_size=1, hangs=True)], "tools": [ADD]}, "One", ""),
    "log-probs": (
        {"replies": ["One</think>So 9.<|end|>"], "opinions": [Opinion(hangs=True)], "logprobs": True},
        "One",
        "So 9.",
    ),
}


@pytest.mark.parametrize("stalls", STALLS)
async def test_whatever_stalls_a_request_ends_at_its_deadline_with_what_was_committed(
    stalls: str,
) -> None:
    script, reasoning, answer = STALLS[stalls]
    options = dict(script)
    pair = pair_of(*(options.pop(name, []) for name in ("replies", "opinions", "draft_replies")))
    policy = "specreason" if "opinions" in script and stalls != "log-probs" else "target"
    spec, since = StepSpec(policy=policy, pair=pair), time.perf_counter()
    events = [event async for event in spec.stream("How many?", deadline_s=0.1, **options)]
    done = events[-1]
    assert time.perf_counter() - since < 0.4
    assert isinstance(done, Done)
    done.result.counts.check()
    assert done.result.reasoning == reasoning
    assert all(call.problem for call in done.result.tool_calls)
    assert done.result.answer == answer or stalls == "a call"
    ends = ("stop", None) if stalls == "log-probs" else ("length", "deadline")
    assert (done.result.finish_reason, done.result.limit) == ends
    assert pair.target.num_open == pair.draft.num_open == 0  # type: ignore[union-attr]


async def test_a_request_that_is_late_when_it_begins_asks_no_model() -> None:
    pair = pair_of([])
    request = await StepSpec(pair=pair).prepare("How many?", deadline_s=1.0)
    (done,) = [event async for event in request.stream(queue_s=2.0)]
    assert isinstance(done, Done)
    assert (done.result.finish_reason, done.result.limit, done.result.counts.committed) == ("length", "deadline", 0)


async def test_a_schema_that_takes_too_long_to_check_ends_the_request_at_its_deadline() -> None:
    pair = pair_of([])

    async def check(schema: str) -> None:
        await asyncio.sleep(60)

    pair.target.check_schema = check  # type: ignore[method-assign]
    result = await ask(pair, json_schema=SCHEMA, deadline_s=0.05)
    assert (result.answer, result.finish_reason, result.limit) == ("", "length", "deadline")


# Schemas.


async def test_the_answer_follows_its_schema_and_the_thinking_is_free() -> None:
    pair = pair_of(['{"n": 9}<|end|>'], [ONE, "</think>"], [ONE, "</think>"])
    result = await ask(pair, json_schema=SCHEMA)
    assert (result.reasoning, json.loads(result.answer)) == (ONE, {"n": 9})
    assert [json.loads(call.json_schema) for call in calls(pair)] == [SCHEMA]
    assert pair.draft is not None
    assert all(call.json_schema is None for call in pair.draft.calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["target", "draft"])
async def test_with_a_schema_a_single_writer_needs_two_calls(policy: str) -> None:
    replies = ["One</think>", '{"n": 9}<|end|>']
    pair = pair_of(replies if policy == "target" else [], [], replies)
    result = await ask(pair, policy, json_schema=SCHEMA)
    assert (result.reasoning, json.loads(result.answer)) == ("One", {"n": 9})


async def test_without_separate_thinking_the_target_writes_the_json_without_drafts() -> None:
    pair = pair_of(['{"n": 9}<|end|>'], tags=False)
    result = await ask(pair, json_schema=SCHEMA)
    assert json.loads(result.answer) == {"n": 9}
    assert result.counts.drafted == 0


async def test_a_schema_is_refused_if_the_engine_does_not_support_it() -> None:
    pair = pair_of([], abilities=EVERYTHING - {"json schema"})
    for options in ({"json_schema": SCHEMA}, {"tools": [ADD], "tool_choice": "add"}):
        with pytest.raises(UsageError, match="does not support a JSON schema"):
            await ask(pair, "target", **options)


# Tools.


async def test_a_tool_call_is_an_event_and_not_part_of_the_answer() -> None:
    pair = following_pair()
    spec = StepSpec(policy="two-level", pair=pair)
    events = [event async for event in spec.stream("Please add 4.", tools=[ADD])]
    (called,) = [event.call for event in events if isinstance(event, ToolCalled)]
    assert (called.name, json.loads(called.arguments)) == ("add", {"a": 4})
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.result.answer, done.result.finish_reason) == ("", "tool_calls")
    assert done.result.tool_calls == (called,)
    assert done.result.reasoning == "".join(THOUGHTS)


async def test_both_models_see_the_result_of_a_tool() -> None:
    pair = following_pair()
    spec = StepSpec(policy="two-level", pair=pair)
    first = await spec.generate("Please add 4.", tools=[ADD])
    call = first.tool_calls[0]
    turns = [
        {"role": "user", "content": "Please add 4."},
        {
            "role": "assistant",
            "content": first.answer,
            "reasoning_content": first.reasoning,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "12"},
    ]
    assert (await spec.generate(turns, tools=[ADD])).answer == "\n\nIt is 12."
    for engine in (pair.target, pair.draft):
        seen = asked_of(engine)
        assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"a": 4}
        assert seen[1]["reasoning_content"] == first.reasoning


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_a_required_call_is_enforced_by_a_schema(choice: str) -> None:
    pair = following_pair()
    result = await ask(pair, "two-level", "It is 4.", tools=[ADD], tool_choice=choice)
    assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [("add", {"a": 4})]
    assert result.finish_reason == "tool_calls"


async def test_a_call_is_distinguished_from_a_json_answer() -> None:
    result = await ask(following_pair(), "two-level", "It is 4.", tools=[ADD], json_schema=SCHEMA)
    assert [call.name for call in result.tool_calls] == ["add"]


@pytest.mark.parametrize(("parallel", "names"), [(True, ["add", "add"]), (False, ["add"])])
async def test_several_calls_are_made_only_if_allowed(parallel: bool, names: list[str]) -> None:
    pair = pair_of([f"</think>{CALL}\n{CALL}<|end|>"])
    result = await ask(pair, "target", tools=[ADD], parallel_tool_calls=parallel)
    assert [call.name for call in result.tool_calls] == names
    assert result.finish_reason == "tool_calls"


async def test_a_call_after_thinking_that_was_cut_off_is_still_a_call() -> None:
    slow = [Reply(ONE, delay_s=60.0)]
    result = await ask(pair_of([f"{CALL}<|end|>"], [], slow), tools=[ADD], max_thinking_s=0.05)
    assert (result.finish_reason, result.limit) == ("tool_calls", "max_thinking_s")


async def test_a_list_schema_is_refused_beside_tools() -> None:
    with pytest.raises(UsageError, match="Wrap it in an object"):
        await ask(following_pair(), tools=[ADD], json_schema={"type": "array"})


async def test_a_single_stop_string_needs_no_list() -> None:
    assert (await ask(pair_of(["One</think>So 9. Done.<|end|>"]), "target", stop=" Done")).answer == "So 9."


async def test_without_separate_thinking_nothing_counts_as_reasoning() -> None:
    result = await ask(pair_of(["One two.<|end|>"], tags=False), "target")
    assert (result.usage.reasoning_tokens, result.thinks) == (0, False)


async def test_contradictory_options_are_refused() -> None:
    with pytest.raises(UsageError, match="does not match json_schema"):
        await ask(following_pair(), tools=[ADD], tool_choice="add", json_schema=SCHEMA)


async def test_a_draft_s_call_is_rejected_without_a_judge_and_the_target_writes_its_own() -> None:
    """Without separate thinking, a step may be a tool call."""
    # The first token of the target only measures it.
    pair = pair_of([ONE, f"{CALL}<|end|>"], [ONE, Opinion(CALL, rating="9")], [ONE, f"{CALL}<|end|>"], tags=False)
    spec = StepSpec(policy="two-level", pair=pair)
    events = [event async for event in spec.stream("Please.", tools=[ADD])]
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert [(step.origin, step.num_from_draft) for step in steps] == [("draft", 4), ("target", 0)]
    done = events[-1]
    assert isinstance(done, Done)
    assert [call.name for call in done.result.tool_calls] == ["add"]
    assert done.result.answer == ONE.rstrip()


@pytest.mark.parametrize("call", ['{"name": "add", "arguments": {}}', '```json\n{"name": "add", "arguments": {}}\n```'])
async def test_a_call_without_marks_is_the_target_s_own(call: str) -> None:
    pair = pair_of([f"{call}<|end|>"], [Opinion(call, rating="9")], [f"{call}<|end|>"], tags=False)
    result = await ask(pair, tools=[ADD])
    assert [(step.origin, step.num_from_draft) for step in result.steps] == [("target", 0)]
    assert ([called.name for called in result.tool_calls], result.answer) == (["add"], "")
    assert result.finish_reason == "tool_calls"


async def test_after_the_beginning_of_a_call_nothing_is_speculated() -> None:
    written = ["Well.\n\n", '<tool_call>{"name": "add", "arguments": {"a":\n\n', "4}}</tool_call><|end|>"]
    opinions = [Opinion(rating="0"), Opinion(rating="0")]
    pair = pair_of(written, opinions, ["Five.\n\n", "Six.\n\n"], tags=False)
    result = await ask(pair, tools=[ADD])
    assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [("add", {"a": 4})]
    assert result.counts.steps_judged == 2


async def test_a_call_that_was_cut_short_is_no_call() -> None:
    result = await ask(pair_of(["</think><tool_call> add one two three four"]), "target", tools=[ADD], max_tokens=8)
    assert (result.tool_calls, result.answer, result.finish_reason) == ((), "", "length")


async def test_an_error_carries_the_committed_text_once() -> None:
    pair = pair_of([Reply("One two", chunk_size=1, fails=EngineError("It broke."))], tags=False)
    with pytest.raises(TargetError) as caught:
        await ask(pair, "target")
    assert caught.value.committed == "One two"


@pytest.mark.parametrize(
    ("policy", "texts"),
    [("target", [f"{ONE}Now then.{CALL}<|end|>"]), ("specreason", [ONE, f"Now then.{CALL}<|end|>"])],
)
async def test_where_steps_are_the_answer_it_is_emitted_while_it_is_written(policy: str, texts: list[str]) -> None:
    """This holds for steps that the target writes; drafted text is emitted once it is accepted."""
    replies = [Reply(text, chunk_size=1) for text in texts]
    pair = pair_of(replies, [Opinion(rating="0")] * 2, ["Five.\n\n", "Six.\n\n"], tags=False)
    spec = StepSpec(policy=policy, pair=pair)
    events = [event async for event in spec.stream("Please.", tools=[ADD], max_tokens=60)]
    first = next(position for position, event in enumerate(events) if isinstance(event, StepCommitted))
    assert sum(isinstance(event, AnswerDelta) for event in events[:first]) >= 2
    assert sum(isinstance(event, ToolCalled) for event in events) == 1
    done = events[-1]
    assert isinstance(done, Done)
    emitted = "".join(event.text for event in events if isinstance(event, AnswerDelta))
    assert emitted == done.result.answer


async def test_where_steps_are_the_answer_a_stop_string_ends_the_generation_immediately() -> None:
    pair = pair_of([Reply("One two three four five.\n\nSix.<|end|>", chunk_size=1)], tags=False)
    result = await ask(pair, "target", stop=["three"])
    assert (result.answer, result.finish_reason) == ("One two ", "stop")
    assert result.counts.committed < 6


# All families.


@pytest.mark.parametrize("family", [*FAMILIES])
async def test_tools_schemas_and_stop_strings_hold_in_every_family(family: str) -> None:
    judges = [{"kind": "always"}] if FAMILIES[family].table.judged else []
    policy = Policy.model_validate({"version": 1, "summary": "a test", "family": family, "judges": judges})
    called = await ask(following_pair(), policy, "Please add 4.", tools=[ADD])
    assert [(call.name, json.loads(call.arguments)) for call in called.tool_calls] == [("add", {"a": 4})]
    assert (called.reasoning, called.answer, called.finish_reason) == ("".join(THOUGHTS), "", "tool_calls")
    if FAMILIES[family].table.speculates:
        assert called.counts.accepted > 0
    held = await ask(following_pair(), policy, "It is 4.", json_schema=SCHEMA)
    assert (held.reasoning, json.loads(held.answer)) == ("".join(THOUGHTS), {"n": 4})
    stopped = await ask(following_pair(), policy, "Hello", stop=[" things"])
    assert (stopped.reasoning, stopped.answer, stopped.finish_reason) == ("".join(THOUGHTS), "\n\nYou said 1", "stop")
    cut = await ask(following_pair(), policy, "Hello", max_thinking_tokens=3)
    assert (cut.usage.reasoning_tokens, cut.limit) == (3, "max_thinking_tokens")
    assert cut.answer
