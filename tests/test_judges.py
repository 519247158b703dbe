"""The judges: what they read from the target's pass and from the step, and how a panel asks several of them."""

import asyncio
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError, field_validator
from pydantic_core import PydanticCustomError
from random_judge import RandomJudge
from scripted import WordTokenizer

from stepspec import SyncStepSpec
from stepspec.engines.protocol import Probe, Tokenizer, Verification
from stepspec.errors import ModelError, UsageError
from stepspec.loop.judge import (
    Evidence,
    Judge,
    Panel,
    _installed,  # pyright: ignore[reportPrivateUsage]
    find_judge,
    judge_kinds,
    shipped_judges,
)
from stepspec.loop.judges.rating import RatingJudge
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.step import Verdict

TOKENIZER = WordTokenizer()
ROOT = Path(__file__).parents[1]


def judge(kind: str, **settings: object) -> Judge:
    return find_judge(kind).model_validate({"kind": kind} | settings)


def rating(**settings: object) -> Judge:
    return judge("rating", **settings)


def likelihood(threshold: float, **settings: object) -> Judge:
    return judge("likelihood", threshold=threshold, **settings)


def verification(
    *logprobs: float, choices: tuple[str, ...] = (), distributions: tuple[dict[int, float], ...] = ()
) -> Verification:
    """Return a verification with these log-probs, and one choice and one distribution over digits for each probe."""
    return Verification(
        logprobs=logprobs,
        choices=(0,) * len(logprobs),
        next_choice=0,
        probe_choices=tuple(TOKENIZER.encode(choice)[0] for choice in choices),
        probe_logprobs=tuple(
            tuple(math.log(distribution[digit]) if distribution.get(digit) else -math.inf for digit in range(10))
            for distribution in distributions
        ),
    )


def ask(
    *judges: Judge,
    seen: Verification | None = None,
    step: str = "A step.",
    cascade: bool = False,
    deadline_s: float = 5,
) -> Verdict:
    """Return a panel's verdict. Without `seen`, the judges must not ask for the target's pass."""

    panel = Panel(judges, TOKENIZER, cascade=cascade, deadline_s=deadline_s)

    async def look(probes: Sequence[Probe]) -> Verification:
        assert seen is not None
        numbers = [panel.probes.index(probe) for probe in probes]
        choices, labels = seen.probe_choices, seen.probe_logprobs
        return replace(
            seen,
            probe_choices=tuple(choices[number] for number in numbers),
            probe_logprobs=tuple(labels[number] for number in numbers) if labels else (),
        )

    return asyncio.run(panel.judge(Evidence("A question?", [], step), look))


def score(one: Judge, seen: Verification) -> float | None:
    return ask(one, seen=seen).scores[one.name]


@pytest.mark.parametrize("digit", range(10))
def test_the_greedy_rating_is_the_digit_that_was_chosen(digit: int) -> None:
    assert score(rating(), verification(choices=(str(digit),), distributions=({},))) == digit


@pytest.mark.parametrize("choice", ["ten", " ", "</think>", "<|end|>"])
def test_a_choice_that_is_no_digit_is_not_a_rating_and_rejects(choice: str) -> None:
    without_digit = verification(-0.1, choices=(choice,), distributions=({9: 0.4},))
    assert ask(rating(threshold=0), seen=without_digit) == Verdict(False, {"rating.specreason": None})


@pytest.mark.parametrize(("value", "accepted"), [(7.0, True), (6.999, False), (9.0, True), (0.0, False)])
def test_a_step_is_accepted_from_the_threshold_on(value: float, accepted: bool) -> None:
    assert (rating(threshold=7).decide(value) == "accept") is accepted


def test_the_rating_s_labels_are_the_ten_digits() -> None:
    probe = rating().probe(TOKENIZER)
    assert probe is not None
    assert [TOKENIZER.decode([label]) for label in probe.labels] == list("0123456789")


class MergingTokenizer(WordTokenizer):
    """Has one token for all digits, and one for yes and no."""

    def encode(self, text: str) -> list[int]:
        text = re.sub("yes|no", "maybe", text)
        return super().encode("".join("#" if char.isdigit() else char for char in text))


@pytest.mark.parametrize(("one", "message"), [(rating(), "each digit its own token"), (judge("yes-no"), "yes and no")])
def test_a_tokenizer_that_merges_the_answers_is_refused(one: Judge, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Panel([one], MergingTokenizer())


@pytest.mark.parametrize(
    ("yes", "no", "expected"), [(0.6, 0.2, 0.75), (0.0, 0.5, 0.0), (0.3, 0.0, 1.0), (0.0, 0.0, None), (1e-9, 0.0, None)]
)
def test_yes_is_weighed_against_no(yes: float, no: float, expected: float | None) -> None:
    seen = verification(-0.1, choices=("ten",), distributions=({0: yes, 1: no},))
    two = Verification(seen.logprobs, seen.choices, 0, (seen.probe_logprobs[0][:2],), seen.probe_choices)
    found = score(judge("yes-no"), two)
    assert found is None if expected is None else found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "name", "expected"),
    [
        ({"statistic": "min"}, "likelihood.min", -4.0),
        ({"statistic": "mean"}, "likelihood.mean", -2.0),
        ({"statistic": "quantile", "quantile": 0.0}, "likelihood.quantile-0", -4.0),
        ({"statistic": "quantile", "quantile": 0.5}, "likelihood.quantile-0.5", -2.0),
        ({"statistic": "quantile", "quantile": 1.0}, "likelihood.quantile-1", 0.0),
    ],
)
def test_the_likelihood_is_a_statistic_of_the_step_s_tokens(
    settings: dict[str, Any], name: str, expected: float
) -> None:
    seen = verification(-2.0, -4.0, 0.0, -1.0, -3.0)
    assert ask(likelihood(-9, **settings), seen=seen).scores == {name: expected}


def test_a_step_of_no_tokens_has_no_likelihood_and_is_rejected() -> None:
    assert ask(likelihood(-3), seen=verification()) == Verdict(False, {"likelihood.min": None})


class ExpectedDigitJudge(RatingJudge):
    """Asks another question than `rating`, and reads the mean over the digits."""

    kind: Any = "expected-digit"

    def probe(self, tokenizer: Tokenizer) -> Probe:
        return replace(super().probe(tokenizer), ids=tuple(tokenizer.encode("Rate it.")))

    async def score(self, evidence: Evidence) -> float:
        return sum(digit * math.exp(logprob) for digit, logprob in enumerate(evidence.label_logprobs))


def test_each_judge_reads_its_own_probe() -> None:
    judges = (rating(threshold=7), likelihood(-3), ExpectedDigitJudge(threshold=3))
    panel = Panel(judges, TOKENIZER)
    assert len(panel.probes) == 2
    assert panel.probes[0] != panel.probes[1]
    distributions: tuple[dict[int, float], ...] = ({2: 1.0}, {4: 1.0})
    for choices, digit, accepted in ((("8", "1"), 4, True), (("6", "9"), 4, False), (("8", "9"), 2, False)):
        seen = verification(-1.0, choices=choices, distributions=(distributions[0], {digit: 1.0}))
        assert ask(*judges, seen=seen).accepted is accepted


@pytest.mark.parametrize(
    ("minimum", "mean", "accepted"), [(-3.0, -1.0, True), (-3.0, -0.9, False), (-1.4, -1.0, False)]
)
def test_a_step_is_accepted_if_no_judge_rejects_it(minimum: float, mean: float, accepted: bool) -> None:
    verdict = ask(likelihood(minimum), likelihood(mean, statistic="mean"), seen=verification(-0.5, -1.5))
    assert verdict == Verdict(accepted, {"likelihood.min": -1.5, "likelihood.mean": -1.0})


@pytest.mark.parametrize(
    ("logprob", "digit", "accepted", "asked"),
    [(-1.0, "0", True, 1), (-9.0, "9", False, 1), (-4.0, "9", True, 2), (-4.0, "0", False, 2)],
)
def test_a_cascade_asks_the_next_judge_only_while_undecided(
    logprob: float, digit: str, accepted: bool, asked: int
) -> None:
    judges = (likelihood(-2, reject_below=-6), rating(threshold=7))
    verdict = ask(*judges, seen=verification(logprob, choices=(digit,), distributions=({},)), cascade=True)
    assert (verdict.accepted, len(verdict.scores)) == (accepted, asked)


def test_a_cascade_in_which_no_judge_decides_rejects() -> None:
    assert not ask(likelihood(-2, reject_below=-6), seen=verification(-4.0), cascade=True).accepted


def test_judges_that_need_no_pass_cause_none() -> None:
    assert ask(judge("always")).accepted
    assert not ask(judge("never")).accepted


def test_a_random_judge_accepts_its_share_and_repeats_itself() -> None:
    steps = [f"Step {number}." for number in range(400)]
    first, second = ([ask(RandomJudge(share=0.3), step=step).accepted for step in steps] for _ in range(2))
    assert first == second
    assert 90 <= sum(first) <= 150
    assert first != [ask(RandomJudge(share=0.3, seed=1), step=step).accepted for step in steps]


class Failing(Judge):
    """Behaves badly in the way that its setting says."""

    asks_target = False
    kind: str
    how: str

    async def score(self, evidence: Evidence) -> float | None:
        if self.how == "raises":
            raise RuntimeError("out of order")
        if self.how == "hangs":
            await asyncio.sleep(60)
        if self.how == "decides oddly":
            return 1.0
        return math.nan if self.how == "nan" else "seven"  # pyright: ignore[reportReturnType]

    def decide(self, score: float) -> Any:
        return True


@pytest.mark.parametrize("how", ["raises", "hangs", "nan", "text", "decides oddly"])
def test_a_judge_that_fails_hangs_or_answers_nonsense_rejects(how: str) -> None:
    verdict = ask(Failing(kind="failing", how=how), judge("always"), deadline_s=0.05)
    assert (verdict.accepted, verdict.scores) == (False, {"failing": None, "always": 1.0})
    errors = {"raises": "RuntimeError: out of order", "hangs": "no score in 0.05 s", "nan": None}
    assert verdict.errors.get("failing", "") in (errors.get(how, verdict.errors.get("failing")), *[""] * (how == "nan"))
    assert bool(verdict.errors) == (how != "nan")


@pytest.mark.parametrize(("kind", "other"), [("arithmetic", "likelihood"), ("random", "always")])
def test_a_removed_judge_names_what_to_use(kind: str, other: str) -> None:
    with pytest.raises(ValidationError, match=f"judge {kind} was removed in 0.2.0; use {other}"):
        Policy.model_validate({"version": 1, "summary": "x", "family": "score", "judges": [{"kind": kind}]})


def test_the_settings_of_judges_are_part_of_a_stored_policy() -> None:
    """LangChain's cache compares stored policies."""
    table = {"kind": "likelihood", "threshold": -3.0}
    policy = {"version": 1, "summary": "x", "family": "score", "judges": [table]}
    first = Policy.model_validate(policy)
    second = Policy.model_validate(policy | {"judges": [table | {"threshold": -2.0}]})
    assert first.model_dump()["judges"][0]["threshold"] == -3.0
    assert first.model_dump_json() != second.model_dump_json()
    assert Policy.model_validate_json(first.model_dump_json()) == first


def test_every_judge_that_ships_has_the_kind_of_its_file_and_can_be_in_a_policy() -> None:
    assert {"likelihood", "rating", "yes-no", "always", "never"} <= {*shipped_judges()}
    needed: dict[str, dict[str, object]] = {}
    needed |= {kind: {"threshold": -3.0} for kind in ("likelihood", "draft-confidence")}
    found: set[str] = set()
    for family in ("score", "compare"):
        kinds = [kind for kind in shipped_judges() if family in find_judge(kind).families]
        tables = [{"kind": kind} | needed.get(kind, {}) for kind in kinds]
        policy = Policy.model_validate({"version": 1, "summary": "all", "family": family, "judges": tables})
        assert [each.kind for each in policy.judges] == kinds
        assert len({each.name for each in policy.judges}) == len(tables)
        found |= {*kinds}
    assert found == {*shipped_judges()}


def test_a_judge_of_another_family_and_a_table_without_effect_are_refused() -> None:
    head = {"version": 1, "summary": "x"}
    for wrong, message in [
        ({"family": "score", "judges": [{"kind": "equivalence"}]}, "is for family 'compare', not 'score'"),
        ({"family": "route", "judges": [{"kind": "always"}]}, "the other families take none"),
        ({"family": "compare"}, "need at least one"),
        ({"family": "route", "compare": {"depth": 2}}, r"a \[compare\] table has no effect in family 'route'"),
        ({"family": "compare", "judges": [{"kind": "never"}], "salvage": {}}, r"a \[salvage\] table has no effect"),
        ({"family": "route", "route": {"signal": "words", "threshold": 1.0}}, "threshold has no effect"),
        ({"family": "route", "route": {"doubts": 3}}, "doubts has no effect with the signal 'first-entropy'"),
        ({"family": "target", "score": {"depth": 2}}, r"a \[score\] table has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            Policy.model_validate(head | wrong)


def test_a_judge_of_an_installed_package_works_in_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the package that docs/examples.md shows, and runs a question with its judge."""
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    source = shutil.copytree(ROOT / "docs" / "examples" / "judge_package", tmp_path / "source")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "--no-deps",
        "--no-build-isolation",
        "--target",
    ]
    subprocess.run([*install, tmp_path / "site", source], check=True, capture_output=True)
    (question,) = re.findall(r'stepspec run --policy short.toml "(.*?)"', page)
    monkeypatch.syspath_prepend(tmp_path / "site")
    _installed.cache_clear()
    try:
        with SyncStepSpec(policy=str(source / "short.toml")) as spec:
            result = spec.generate(question)
    finally:
        _installed.cache_clear()
    assert result.counts.steps_accepted > 0, result
    scores = [score for step in result.steps for score in step.scores.values()]
    assert all(score is not None and score < 0 for score in scores), result.steps


class Particular(Failing):
    """Refuses its settings in the way that they say."""

    @field_validator("how")
    @classmethod
    def _checked(cls, how: str) -> str:
        if how == "custom":
            raise PydanticCustomError("my_error", "{how} is not liked", {"how": how})
        raise TypeError("no such thing")


@pytest.mark.parametrize(
    ("found", "how", "message"),
    [
        (int, "", r"the judge broken cannot be loaded: TypeError: .* is not a subclass of"),
        (Particular, "custom", "custom is not liked"),
        (Particular, "other", "the judge broken cannot be loaded: TypeError: no such thing"),
    ],
)
def test_a_faulty_judge_of_an_installed_package_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Any, how: str, message: str
) -> None:
    class Point:
        name = "broken"

        def load(self) -> Any:
            return found

    monkeypatch.setattr("stepspec.loop.judge._installed", lambda: {"broken": Point()})
    assert "broken" in judge_kinds()
    file = tmp_path / "mine.toml"
    table = f'[[judges]]\nkind = "broken"\nhow = "{how}"\n'
    file.write_text(f'version = 1\nsummary = "x"\nfamily = "score"\n{table}', "utf-8")
    with pytest.raises(UsageError, match=message):
        load_policy(str(file))


def test_a_wrong_judges_table_is_explained_before_any_judge_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('version = 1\nsummary = "x"\nfamily = "score"\njudges = "rating"\n', "utf-8")
    program = "import sys; from stepspec.loop.policy import load_policy; load_policy(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True)
    assert "judges must be tables: [[judges]]." in done.stderr
