"""The policy files load and say what they emulate; a wrong one is refused in one sentence that helps."""

from pathlib import Path
from typing import Any

import pytest

from stepspec.errors import UsageError
from stepspec.files import list_data_files
from stepspec.policy import Policy, RatingSpec, load_policy
from stepspec.prompts import rating_prompt

NAMES = list(list_data_files("policies"))
EMULATED = {"specreason": "arXiv:2504.07891", "token": "arXiv:2211.17192"}

HEAD = 'version = 1\nsummary = "mine"\nfamily = "score"\n'
RATING = '[[judges]]\nkind = "rating"\n'


def refusal(tmp_path: Path, text: str) -> str:
    """Why a policy file with this text is refused; the message names the file first."""
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError) as caught:
        load_policy(str(file))
    assert str(file) in str(caught.value)
    assert str(caught.value).count("\n") == 0
    assert ".." not in str(caught.value)
    return str(caught.value).replace(str(file), "FILE")


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_loads_and_opens_with_a_comment(name: str) -> None:
    policy, text = load_policy(name)
    assert text == list_data_files("policies")[name].read_text("utf-8")
    assert text.startswith("# ")
    assert policy.summary
    assert not policy.summary.endswith(".")


@pytest.mark.parametrize(("name", "paper"), EMULATED.items())
def test_a_policy_that_emulates_a_paper_names_it_as_a_value_and_in_its_comment(name: str, paper: str) -> None:
    policy, text = load_policy(name)
    assert policy.paper == paper
    comment = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert paper in comment


def test_specreason_has_the_published_defaults() -> None:
    policy, _ = load_policy("specreason")
    judge = RatingSpec(kind="rating", prompt="specreason", readout="greedy", threshold=7.0)
    assert policy.family == "score"
    assert policy.judges == (judge,)
    assert (policy.step.delimiter, policy.step.max_step_tokens) == ("\n\n", 512)
    assert (policy.first_target_steps, policy.salvage, policy.token.drafter) == (0, None, "engine")


def test_specreason_asks_with_the_published_words() -> None:
    prompt = rating_prompt("specreason")
    assert prompt.user == (
        "Evaluate the last reasoning step solely based on factual correctness and logical validity. Ignore "
        "style, phrasing, or overall usefulness—only judge whether the step is objectively correct and "
        "logically follows from prior steps. Assign a score from 0 to 9."
    )
    assert prompt.prefill == "<think>I think the quality score is: "


@pytest.mark.parametrize(
    ("name", "needs_draft"), [("target", False), ("token", True), ("draft", True), ("specreason", True)]
)
def test_a_policy_knows_whether_it_needs_a_draft(name: str, needs_draft: bool) -> None:
    assert load_policy(name)[0].needs_draft is needs_draft


@pytest.mark.parametrize(
    ("text", "key", "closest", "where"),
    [
        (HEAD + RATING + "treshold = 3", "treshold", "threshold", "judges.0.rating.treshold"),
        (HEAD + '[[judges]]\nkind = "likelihood"\nthreshld = -3', "threshld", "threshold", "judges.0"),
        (HEAD + RATING + '[step]\ndelimeter = "x"', "delimeter", "delimiter", "step.delimeter"),
        (HEAD + RATING + "[salvage]\nmin_logprb = -1", "min_logprb", "min_logprob", "salvage.min_logprb"),
        (HEAD + RATING + "[token]\nnum_token = 3", "num_token", "num_tokens", "token.num_token"),
        (
            HEAD + "first_target_step = 3\n" + RATING,
            "first_target_step",
            "first_target_steps",
            "first_target",
        ),
        (HEAD.replace("family", "famly") + RATING, "famly", "family", "famly"),
        (HEAD + RATING + "[steps]\n", "steps", "step", "steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_one(
    tmp_path: Path, text: str, key: str, closest: str, where: str
) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith(f"FILE: There is no key '{key}'. Did you mean '{closest}'? Known: ")
    assert f"(at {where}" in said


def test_an_unknown_key_is_compared_with_those_of_its_own_table_only(tmp_path: Path) -> None:
    said = refusal(tmp_path, HEAD + RATING + "min_logprob = -3")
    assert "Known: kind, prompt, readout, threshold." in said


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (HEAD + '[[judges]]\nkind = "ratin"', "judges.0: Input tag 'ratin' found using 'kind'"),
        (HEAD + "[[judges]]\nthreshold = 3", "judges.0: Unable to extract tag using discriminator 'kind'"),
        (HEAD + RATING + 'prompt = "shrt"', "no rating prompt 'shrt'. Did you mean 'short'?"),
        (
            HEAD + RATING + 'readout = "average"',
            "judges.0.rating.readout: Input should be 'greedy' or 'expected'",
        ),
        (HEAD, "family 'score' needs at least one [[judges]] table"),
        (HEAD.replace("score", "target") + RATING, "the other families take none"),
        (HEAD.replace("score", "scroe") + RATING, "family: Input should be 'target', 'draft' or 'score'"),
        (HEAD.replace("= 1", "= 2") + RATING, "version: Input should be 1"),
        ("", "version: Field required"),
    ],
)
def test_a_wrong_name_or_combination_is_refused_where_it_stands(tmp_path: Path, text: str, part: str) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith("FILE: ")
    assert part in said


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('threshold = "7"', "judges.0.rating.threshold: Input should be a valid number"),
        ("threshold = true", "judges.0.rating.threshold: Input should be a valid number"),
        ("threshold = 10", "judges.0.rating.threshold: Input should be less than or equal to 9"),
        ("threshold = nan", "judges.0.rating.threshold: "),
        ('[step]\nmax_step_tokens = "512"', "step.max_step_tokens: Input should be a valid integer"),
        ("[step]\nmax_step_tokens = true", "step.max_step_tokens: Input should be a valid integer"),
        ("[step]\nmax_step_tokens = 0", "step.max_step_tokens: Input should be greater than or equal to 1"),
        ("[step]\ndelimiter = 3", "step.delimiter: Input should be a valid string"),
        ('[step]\ndelimiter = ""', "step.delimiter: String should have at least 1 character"),
        ("[salvage]\nmin_logprob = 1", "salvage.min_logprob: Input should be less than or equal to 0"),
        ("[token]\nnum_tokens = 2.5", 'token.num_tokens: it must be "auto" or a whole number from 1 to 64'),
        ("[token]\nnum_tokens = 65", 'token.num_tokens: it must be "auto" or a whole number from 1 to 64'),
        ('[token]\ndrafter = "medua"', "token.drafter: Input should be 'none', 'draft-model', 'prompt-lookup'"),
        ("[token]\ntolerance = 2", "token.tolerance: Input should be less than or equal to 1"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(tmp_path: Path, line: str, where: str) -> None:
    assert refusal(tmp_path, HEAD + RATING + line).startswith(f"FILE: {where}")


def test_a_whole_number_is_a_number_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(HEAD + RATING + "threshold = 3", "utf-8")
    (judge,) = load_policy(str(file))[0].judges
    assert judge == RatingSpec(kind="rating", threshold=3.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version = ", "is not valid TOML"),
        (b"version = 1\nversion = 1", "is not valid"),
        (b"\xff\xfe", "Cannot read"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        load_policy(str(file))
    assert str(file) in str(caught.value)


def test_a_policy_that_does_not_exist_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="Did you mean 'specreason'"):
        load_policy("specreson")
    with pytest.raises(UsageError, match="There is no policy file at"):
        load_policy("nowhere/mine.toml")


def test_a_policy_does_not_change_after_loading() -> None:
    policy: Any = load_policy("specreason")[0]
    with pytest.raises(ValueError, match="frozen"):
        policy.family = "draft"
    assert isinstance(policy, Policy)
