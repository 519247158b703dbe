"""The embedded pair adds a note to questions unlike its training data, and to no others."""

import html
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from commands import stepspec

from evals.training.gsm_mini import load_split
from evals.training.scope import means
from stepspec import Done, Noted, StepSpec
from stepspec.api.models import load_pair
from stepspec.api.pairs import EMBEDDED
from stepspec.api.scope import MAX_READ, PairScope, PromptReader
from stepspec.api.session import MAX_UNKNOWN_TOKENS
from stepspec.engines.protocol import Verification, Verify
from stepspec.engines.torch_engine import TorchEngine
from stepspec.errors import EngineError
from stepspec.loop.certificate import least_logprob
from stepspec.loop.result import result_html

pytestmark = pytest.mark.anyio

TYPED = Path(__file__).parents[2] / "evals" / "data" / "typed.jsonl"
OTHER = Path(__file__).with_name("other_questions.txt")


@pytest.fixture
async def target() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine.load(str(EMBEDDED / "target"))
    yield engine
    await engine.aclose()


@pytest.mark.parametrize(("num_each", "num_learned"), [(50, 100), pytest.param(100, 1000, marks=pytest.mark.soak)])
async def test_typed_questions_get_a_note_and_trained_ones_do_not(
    target: TorchEngine, num_each: int, num_learned: int
) -> None:
    """Uses problems in other words, questions on any subject, and gsm-mini problems."""
    bound = PairScope.load(EMBEDDED).least_logprob
    typed = [json.loads(line)["question"] for line in TYPED.read_text("utf-8").splitlines()]
    other = OTHER.read_text("utf-8").splitlines()
    learned = [problem.question for problem in itertools.islice(load_split("test"), num_learned)]
    assert len(typed) == len(other) == 100
    strange = typed[:num_each] + other[:num_each]
    assert sum(mean < bound for mean in await means(target, strange)) >= 0.95 * len(strange)
    likely = await means(target, learned)
    assert sum(mean < bound for mean in likely) <= 0.01 * num_learned
    of_calibration = [problem.question for problem in itertools.islice(load_split("calibration"), 400)]
    certified = least_logprob(await means(target, of_calibration))
    assert certified is not None
    assert sum(mean < certified for mean in likely) <= 0.05 * num_learned
    for questions in (typed[:num_each], other[:num_each]):
        assert sum(mean < certified for mean in await means(target, questions)) >= 0.95 * num_each


async def test_a_result_has_the_note_and_notebooks_show_it() -> None:
    knows = PairScope.load(EMBEDDED).knows
    problem = next(load_split("test"))
    async with StepSpec() as spec:
        strange, known = await spec.batch(["What is the capital of France?", problem.question], max_tokens=20)
    assert (strange.note, known.note) == (knows, None)
    assert html.escape(knows) in result_html(strange)
    assert "Note:" not in result_html(known)


async def test_the_note_comes_first_and_bounds_the_answer_unless_the_request_does() -> None:
    question, problem = "What is the capital of France?", next(load_split("test"))
    async with StepSpec() as spec:
        events = [event async for event in spec.stream(question)]
        assert events[0] == Noted(PairScope.load(EMBEDDED).knows)
        assert sum(isinstance(event, Noted) for event in events) == 1
        done = events[-1]
        assert isinstance(done, Done)
        assert done.result.counts.committed <= MAX_UNKNOWN_TOKENS
        assert (await spec.generate(question, max_tokens=MAX_UNKNOWN_TOKENS + 9)).limit == "max_tokens"
        known = [event async for event in spec.stream(problem.question)]
        assert not any(isinstance(event, Noted) for event in known)


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_run_says_first_what_the_pair_knows_and_stops(options: list[str]) -> None:
    done = stepspec("run", "What is the capital of France?", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"stepspec: {PairScope.load(EMBEDDED).knows}\n"


@pytest.mark.parametrize("name", ["typed", "gsm-mini"])
def test_an_evaluation_says_first_that_the_problems_are_others(name: str, tmp_path: Path) -> None:
    settings = ("--limit", "2", "--policy", "target", "--max-tokens", "8", "--output", tmp_path / "run")
    done = stepspec("eval", name, *settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(PairScope.load(EMBEDDED).knows) == (name == "typed")
    title = f"{name}, temperature 0, concurrency 1, at most 8 tokens, the embedded pair: 2 problems, 95% intervals"
    assert title in " ".join(done.stdout.split())


async def test_the_note_does_not_count_as_a_cached_prompt() -> None:
    question = "".join(random.Random(0).choices("abc def ", k=300))
    async with StepSpec(policy="target") as spec:
        result = await spec.generate(question, max_tokens=5)
    assert result.note is not None
    assert result.num_cached_tokens == 0


async def test_a_pair_loaded_without_notes_adds_none() -> None:
    pair = load_pair(notes=False)
    async with StepSpec(pair=pair) as spec:
        assert (await spec.generate("What is the capital of France?", max_tokens=5)).note is None
    await pair.aclose()


async def test_custom_models_have_no_note_and_a_failed_check_does_not_fail_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = f"torch:{EMBEDDED / 'target'}"
    async with StepSpec(weights, policy="target") as spec:
        assert spec.pair.scope is None
    async with StepSpec(policy="target") as spec:

        async def fails(*_: object, **__: object) -> None:
            raise EngineError("It broke.")

        monkeypatch.setattr(spec.pair.target, "verify", fails)
        result = await spec.generate("What is the capital of France?", max_tokens=5)
    assert result.note is None
    assert result.counts.committed == 5


async def test_the_turns_of_a_conversation_are_checked_once(
    target: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, num_checks, verify = PairScope.load(EMBEDDED), 0, target.verify

    async def counted(call: Verify) -> Verification:
        nonlocal num_checks
        num_checks += 1
        return await verify(call)

    monkeypatch.setattr(target, "verify", counted)
    reader = PromptReader(target)
    prompt = random.Random(0).choices(range(10, 200), k=MAX_READ)
    for _ in range(3):
        assert scope.note(await reader.mean_logprob(prompt)) == scope.knows
        prompt += range(10, 50)
    assert num_checks == 1
    assert scope.note(await reader.mean_logprob(range(10, 60))) == scope.knows
    assert num_checks == 2
