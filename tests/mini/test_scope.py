"""The embedded pair notes questions that are unlike what it has learned, and no others."""

import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stepspec import StepSpec
from stepspec.api.pairs import EMBEDDED
from stepspec.api.scope import PairScope
from stepspec.api.session import load_pair
from stepspec.engines.torch_engine import TorchEngine
from stepspec.errors import EngineError
from stepspec.evaluation.generators.gsm_mini import load_split
from stepspec.loop.rendering import result_html
from stepspec.mini.scope import means

pytestmark = pytest.mark.anyio

TYPED = Path(__file__).parents[2] / "evals" / "data" / "typed.jsonl"
OTHER = Path(__file__).with_name("other_questions.txt")


@pytest.fixture
async def target() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine.load(str(EMBEDDED / "target"))
    yield engine
    await engine.aclose()


async def test_what_people_type_is_noted_and_what_was_learned_is_not(target: TorchEngine) -> None:
    """A hundred small problems in other words, a hundred questions about anything, a thousand of gsm-mini's."""
    bound = PairScope.load(EMBEDDED).least_logprob
    typed = [json.loads(line)["question"] for line in TYPED.read_text("utf-8").splitlines()]
    other = OTHER.read_text("utf-8").splitlines()
    learned = [problem.question for problem in itertools.islice(load_split("test"), 1000)]
    assert len(typed) == len(other) == 100
    assert sum(mean < bound for mean in await means(target, typed + other)) >= 0.95 * 200
    assert sum(mean < bound for mean in await means(target, learned)) <= 0.01 * 1000


async def test_a_result_has_the_note_and_notebooks_show_it() -> None:
    knows = PairScope.load(EMBEDDED).knows
    problem = next(load_split("test"))
    async with StepSpec() as spec:
        strange, known = await spec.batch(["What is the capital of France?", problem.question], max_tokens=20)
    assert (strange.note, known.note) == (knows, None)
    assert knows in result_html(strange)
    assert "Note:" not in result_html(known)


async def test_the_note_does_not_read_as_a_cached_prompt_nor_count_in_the_times() -> None:
    question = "".join(random.Random(0).choices("abc def ", k=300))
    async with StepSpec(policy="target") as spec:
        result = await spec.generate(question, max_tokens=5)
    assert result.note is not None
    assert result.num_cached_tokens == 0


async def test_where_figures_are_measured_nothing_is_noted() -> None:
    pair = load_pair(notes=False)
    async with StepSpec(pair=pair) as spec:
        assert (await spec.generate("What is the capital of France?", max_tokens=5)).note is None
    await pair.aclose()


async def test_models_of_ones_own_have_no_note_and_a_failing_target_costs_no_answer(
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
