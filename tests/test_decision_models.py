"""The judge `decision`: it asks LangChain's decision models, and is undecided where they give no probability."""

import asyncio
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from commands import stepspec
from langchain_core.decisions import BaseDecisionModel, ChoiceAnswer, ClassifierResponse, Noul, NoulAnswer
from pydantic import Field
from scripted import WordTokenizer

from stepspec import Policy, StepSpec, SyncStepSpec, load_pair
from stepspec.api.models import check_models
from stepspec.engines.decision_model import DecisionModel
from stepspec.errors import MissingExtraError, ModelError, UsageError
from stepspec.evaluation.records import JudgedStepRecord
from stepspec.evaluation.replay.decisions import decide
from stepspec.langchain import ChatStepSpec
from stepspec.loop.judge import Evidence, Panel
from stepspec.loop.step import Step, Verdict

QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"
DOCS = Path(__file__).parents[1] / "docs"


class Opinion(BaseDecisionModel):
    """Answers every question with `right`, or behaves as `how` says."""

    model: str = "opinion"
    right: float = 1.0
    how: Literal["answers", "abstains", "raises", "times out", "is slow", "chooses"] = "answers"
    asked: list[Any] = Field(default_factory=list[Any])

    @property
    def _provider(self) -> str:
        return "tests"

    def _classify(self, state: Any, questions: Mapping[str, Any]) -> ClassifierResponse:
        self.asked.append((state, *questions.values(), threading.current_thread()))
        if self.how == "raises":
            raise ConnectionError("out of order")
        if self.how == "times out":
            raise TimeoutError("no answer")
        if self.how == "is slow":
            time.sleep(0.4)
        answer: Any = NoulAnswer(type="noul", noul=self.right)
        if self.how == "chooses":
            answer = ChoiceAnswer(type="choice", choice="a", probabilities={"a": 1.0}, confidence=1.0)
        answers = {} if self.how == "abstains" else dict.fromkeys(questions, answer)
        return ClassifierResponse(model=self.model, answers=answers)


class AsyncOpinion(Opinion):
    """Has an asynchronous method."""

    async def _aclassify(self, state: Any, questions: Mapping[str, Any]) -> ClassifierResponse:
        return self._classify(state, questions)


def policy(*tables: Mapping[str, Any], judging: str = "cascade") -> Policy:
    return Policy.model_validate(
        {"version": 1, "summary": "a test", "family": "score", "judging": judging, "judges": tables}
    )


def decision(**settings: Any) -> dict[str, Any]:
    return {"kind": "decision", **settings}


ALWAYS, NEVER = {"kind": "always"}, {"kind": "never"}
STEP = Step(0, "target", "Ann has 12.\n\n", 4, 0, "delimiter")


async def verdict(under: Policy, deadline_s: float = 5.0, **models: BaseDecisionModel) -> Verdict:
    panel = Panel(under.judges, WordTokenizer(), cascade=under.judging == "cascade", deadline_s=deadline_s)
    judges: Any = {name: DecisionModel.load(model) for name, model in models.items()}
    evidence = Evidence(QUESTION, [STEP], "So 17.\n\n", models=judges)

    async def no_pass(probes: Any) -> Any:
        raise AssertionError("the judge needs no pass of the target")

    return await panel.judge(evidence, no_pass)


@pytest.mark.parametrize(
    ("right", "accepted", "asked"), [(0.8, True, 1), (0.79, True, 2), (0.3, True, 2), (0.29, False, 1)]
)
def test_the_probability_is_the_score_and_between_the_thresholds_the_next_judge_decides(
    right: float, accepted: bool, asked: int
) -> None:
    model = Opinion(right=right)
    found = asyncio.run(verdict(policy(decision(threshold=0.8, reject_below=0.3), ALWAYS), decision=model))
    assert (found.accepted, len(found.scores), found.scores["decision"]) == (accepted, asked, right)
    ((state, question, _),) = model.asked
    assert state == {"problem": QUESTION, "steps before": "Ann has 12.\n\n", "step": "So 17.\n\n"}
    assert isinstance(question, Noul)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("abstains", None),
        ("raises", "ConnectionError: out of order"),
        ("times out", "TimeoutError: no answer"),
        ("is slow", "no score in 0.1 s"),
        ("chooses", "EngineError: opinion answers a choice to a question for yes or no"),
    ],
)
def test_without_a_probability_the_next_judge_decides(how: Any, error: str | None) -> None:
    for tables, judging, accepted in [
        ((decision(), ALWAYS), "cascade", True),
        ((decision(), NEVER), "cascade", False),
        ((decision(), ALWAYS), "all", True),
        ((decision(),), "all", False),
    ]:
        found = asyncio.run(verdict(policy(*tables, judging=judging), 0.1, decision=Opinion(how=how)))
        assert found.accepted == accepted
        assert found.scores["decision"] is None
        assert found.errors == ({} if error is None else {"decision": error})


def test_a_cascade_asks_decision_models_in_the_order_of_the_policy() -> None:
    tables = decision(model="small", threshold=0.9, reject_below=0.1), decision(model="large")
    for right, names in [(0.95, ["decision.small"]), (0.5, ["decision.small", "decision.large"])]:
        found = asyncio.run(verdict(policy(*tables), small=Opinion(right=right), large=Opinion(right=0.7)))
        assert found.accepted
        assert [*found.scores] == names


def test_a_slow_model_holds_up_neither_the_event_loop_nor_the_verdict() -> None:
    async def ticks_meanwhile() -> tuple[int, float]:
        ticks, since = 0, time.perf_counter()
        asking = asyncio.ensure_future(verdict(policy(decision(), ALWAYS), 0.2, decision=Opinion(how="is slow")))
        while not asking.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert (await asking).accepted
        return ticks, time.perf_counter() - since

    ticks, seconds = asyncio.run(ticks_meanwhile())
    assert ticks >= 5
    assert seconds < 0.35


@pytest.mark.parametrize(("kind", "in_thread"), [(Opinion, True), (AsyncOpinion, False)])
def test_only_a_model_without_an_asynchronous_method_runs_in_a_thread(kind: type[Opinion], in_thread: bool) -> None:
    model = kind()
    assert asyncio.run(verdict(policy(decision()), decision=model)).accepted
    assert (model.asked[0][-1] is not threading.current_thread()) == in_thread


def test_an_error_is_counted_at_every_step_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with SyncStepSpec(
        policy=policy(decision(), ALWAYS), judges={"decision": Opinion(how="raises"), "unused": Opinion()}
    ) as spec:
        result = spec.generate(QUESTION)
    assert result.counts.judge_calls == result.counts.steps_judged == result.counts.steps_accepted > 0
    assert result.note is not None
    assert f"The judge decision failed at {result.counts.steps_judged} steps" in result.note
    logged = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert logged == ["The judge decision failed and did not accept the step: ConnectionError: out of order"]


def test_a_loaded_pair_has_its_decision_models() -> None:
    model = Opinion()
    pair = load_pair(judges={"decision": model})
    assert pair.judges["decision"].describe()["name"] == "opinion"
    assert pair.models["decision"] == "opinion"

    async def answered() -> None:
        result = await StepSpec(policy=policy(decision()), pair=pair).generate(QUESTION)
        assert {step.scores["decision"] for step in result.steps if step.scores} == {1.0}
        assert len(model.asked) == result.counts.steps_judged > 0
        await pair.forget()
        await pair.aclose()

    asyncio.run(answered())


def test_chat_models_take_decision_models() -> None:
    rejecting, accepting = (
        ChatStepSpec(policy=policy(decision()), judges={"decision": Opinion(right=right)}) for right in (0.0, 1.0)
    )
    for chat, accepted in ((rejecting, False), (accepting, True), (rejecting, False)):
        blocks = chat.invoke(QUESTION).content_blocks
        origins = {block["extras"]["origin"] for block in blocks if block["type"] == "reasoning"}
        assert ("draft" in origins) == accepted
    with pytest.raises(ValueError, match="judges"):
        ChatStepSpec(judges={"decision": 7})


def documented(folder: Path) -> list[str]:
    """Copy the files of the example, and return the arguments of the command that its page shows."""
    shutil.copytree(DOCS / "examples" / "decision_model", folder, dirs_exist_ok=True)
    section = (DOCS / "examples.md").read_text("utf-8").partition("## A decision model")[2]
    (command,) = re.findall(r"```sh\ncd .*?\nstepspec (.*?)```", section, re.S)
    words, question = re.fullmatch(r'(.*) "(.*)"', command.strip()).groups()  # type: ignore[union-attr]
    return [*words.split(), question]


def test_the_command_that_the_page_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = documented(tmp_path)
    assert "decision=python:my_decisions:ShortSteps" in arguments
    done = stepspec(*arguments)
    assert done.returncode == 0, done.stderr
    assert "17" in done.stdout
    monkeypatch.delitem(sys.modules, "my_decisions")


MODULE = """
from langchain_core.decisions import BaseDecisionModel
from test_decision_models import Opinion

model, number = Opinion(), 7
def make(): return Opinion()
def fails(): raise OSError("no key")
def makes_a_number(): return 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "decisions_here.py").write_text(MODULE, "utf-8")
    (tmp_path / "faulty_decisions.py").write_text("import nobody_has_this\n", "utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for name in ("decisions_here", "faulty_decisions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "decisions_here"


@pytest.mark.parametrize("name", ["model", "make", "Opinion"])
def test_an_import_path_names_a_model_a_function_or_a_class(module: str, name: str) -> None:
    assert DecisionModel.load(f"{module}:{name}").name == "opinion"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_decisions:make", "cannot be imported: ModuleNotFoundError: No module named 'nowhere_decisions'."),
        ("faulty_decisions:make", "cannot be imported: ModuleNotFoundError: No module named 'nobody_has_this'."),
        ("decisions_here:mak", "cannot be imported: AttributeError: module 'decisions_here' has no attribute 'mak'."),
        ("decisions here", "cannot be imported: ValueError: invalid format: 'decisions here'."),
        ("decisions_here:fails", "cannot be made: OSError: no key."),
        ("decisions_here:number", "is of type 'int'. Give a langchain_core.decisions.BaseDecisionModel,"),
        ("decisions_here:makes_a_number", "is of type 'int'. Give a langchain_core.decisions.BaseDecisionModel,"),
        ("decisions_here", "is of type 'module'. Give a langchain_core.decisions.BaseDecisionModel,"),
    ],
)
def test_a_wrong_import_path_is_an_error_in_a_sentence(module: str, path: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        DecisionModel.load(path)
    assert str(caught.value).startswith(f"The judge model {path!r} {message}")
    if "imported" in message:  # before models load, which may take minutes
        with pytest.raises(ModelError, match=re.escape(message)):
            check_models(judges={"decision": f"python:{path}"})


def test_a_command_refuses_a_wrong_import_path(tmp_path: Path, module: str) -> None:
    arguments = documented(tmp_path)
    place = arguments.index("--judge") + 1
    for spec, message in [
        ("python:nowhere_decisions:make", "No module named 'nowhere_decisions'"),
        ("python:", "'python:' does not name a model"),
        ("pyton:decisions_here:make", "There is no engine of judge models 'pyton'. Did you mean 'python'?"),
    ]:
        done = stepspec(*arguments[:place], f"decision={spec}", *arguments[place + 1 :])
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_an_object_of_another_type_or_in_another_place_is_refused() -> None:
    with pytest.raises(ModelError, match="The judge model 7 is of type 'int'"):
        load_pair(judges={"decision": 7})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="There is no engine kind 'python'"):
        load_pair("python:decisions_here:make")
    with pytest.raises(UsageError, match=r"Name it with --judge decision=python:MODULE:NAME"):
        StepSpec(policy=policy(decision()))
    with pytest.raises(UsageError, match="opinion, does not reward steps"):
        StepSpec(policy=policy({"kind": "reward"}), judges={"reward": Opinion()})


def test_without_langchain_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stepspec.engines.decision_model")
    monkeypatch.setitem(sys.modules, "langchain_core.decisions", None)
    with pytest.raises(MissingExtraError, match=r"needs langchain_core\.decisions, .*langchain\]"):
        check_models(judges={"decision": "python:decisions_here:make"})


def test_a_replay_leaves_a_step_without_a_probability_to_the_next_judge() -> None:
    fields = dict.fromkeys(JudgedStepRecord.model_fields) | {"index": 0, "text": "x", "num_tokens": 1, "scores": {}}
    numbers = {"num_salvaged": 0, "draft_s": 0.0, "judge_s": 0.0, "write_s": 0.0}
    step = JudgedStepRecord.model_validate({**fields, **numbers, "accepted": True, "asked": True})
    scores = {"decision": None, "always": 1.0}
    assert decide(policy(decision(), ALWAYS), step, scores).accepted
    assert not decide(policy(decision()), step, scores).accepted
