"""Policy files: every shipped file loads and names the paper it emulates; an invalid file gets one helpful sentence."""

import datetime
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepspec.base.file_model import FileModel, parse_toml
from stepspec.base.file_problems import first_problem
from stepspec.base.files import list_data_files
from stepspec.chat.prompts import RATING_PROMPT
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import Benchmark
from stepspec.evaluation.report.prices import Prices
from stepspec.loop.judges.always import AlwaysJudge
from stepspec.loop.judges.rating import RatingJudge
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.policy_tables import SalvageTable, TokenTable

NAMES = list(list_data_files("policies"))
EMULATED = {
    "specreason": "arXiv:2504.07891",
    "specreason-decode": "arXiv:2504.07891",
    "token": "arXiv:2211.17192",
    "lookahead": "arXiv:2506.19830",
    "rsd": "arXiv:2501.19324",
    "glimprouter": "arXiv:2601.05110",
    "speculative-thinking": "arXiv:2504.12329",
    "fly": "arXiv:2511.22972",
}

HEAD = 'version = 1\nsummary = "mine"\nfamily = "score"\n'
RATING = '[[judges]]\nkind = "rating"\n'
SUFFIX = '[token]\ndrafter = "suffix"\n'


def refusal(tmp_path: Path, text: str) -> str:
    """Return the error for a policy file with this text, with the file's path replaced by `FILE`."""
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
    judge = RatingJudge(kind="rating", threshold=7.0)
    assert policy.family == "score"
    assert policy.judges == (judge,)
    assert (policy.step.delimiter, policy.step.max_step_tokens) == ("\n\n", 512)
    assert (policy.first_target_steps, policy.salvage, policy.token.drafter) == (0, None, "engine")


def test_exactly_the_policies_that_change_no_text_are_exact() -> None:
    exact = {name for name in list_data_files("policies") if load_policy(name)[0].exact}
    assert exact == {"target", "token", "lookup", "engine", "exact"}
    policy = load_policy("exact")[0]
    assert not policy.model_copy(update={"salvage": SalvageTable(min_logprob=-1.0)}).exact
    relaxed = TokenTable(drafter="auto", acceptance="ratio", threshold=0.1)
    assert not load_policy("token")[0].model_copy(update={"token": relaxed}).exact
    with pytest.raises(ValidationError, match="acceptance 'ratio' is for family 'target', not 'score'"):
        Policy.model_validate({**policy.model_dump(), "token": relaxed})
    judges = (*policy.judges, AlwaysJudge(kind="always"))
    assert policy.model_copy(update={"judges": judges}).exact  # the other one must accept, too
    assert not policy.model_copy(update={"judges": judges, "judging": "cascade"}).exact


def test_specreason_asks_with_the_published_words() -> None:
    prompt = RATING_PROMPT
    assert prompt.user == (
        "Evaluate the last reasoning step solely based on factual correctness and logical validity. Ignore "
        "style, phrasing, or overall usefulness—only judge whether the step is objectively correct and "
        "logically follows from prior steps. Assign a score from 0 to 9."
    )
    assert prompt.prefill == "<think>I think the quality score is: "


@pytest.mark.parametrize(
    ("name", "needs_draft"), [("target", False), ("token", True), ("draft", True), ("specreason", True)]
)
def test_a_policy_states_whether_it_needs_a_draft(name: str, needs_draft: bool) -> None:
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
    message = refusal(tmp_path, text)
    assert message.startswith(f"FILE: There is no key '{key}'. Did you mean '{closest}'? Known: ")
    assert f"(at {where}" in message


def test_an_unknown_key_is_compared_with_those_of_its_own_table_only(tmp_path: Path) -> None:
    message = refusal(tmp_path, HEAD + RATING + "min_logprob = -3")
    assert "Known: kind, reject_below, threshold." in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            HEAD + '[[judges]]\nkind = "ratin"',
            "judges.0.kind 'ratin' is unknown; did you mean 'rating'? Known: 'always', 'decision', ",
        ),
        (
            HEAD + '[[judges]]\nkind = "ratin"',
            "'yes-no'. For another one, install its package.",
        ),
        (
            HEAD + "[[judges]]\nthreshold = 3",
            "judges.0 needs a kind. Known: 'always', 'decision', 'draft-confidence', ",
        ),
        (HEAD + RATING + 'prompt = "short"', "judges.0.rating: there is one question now"),
        (
            HEAD + '[[judges]]\nkind = "likelihood"\nthreshold = -1\nstatistic = "average"',
            "judges.0.likelihood.statistic 'average' is unknown. Known: 'min', ",
        ),
        (
            HEAD + RATING + "reject_below = 7",
            "judges.0.rating: reject_below must be below the threshold, 7.",
        ),
        (
            HEAD + '[[judges]]\nkind = "likelihood"\nstatistic = "quantile"\nthreshold = -1',
            'judges.0.likelihood: statistic = "quantile" needs a quantile',
        ),
        (HEAD, "families 'score' and 'compare' need at least one [[judges]] table"),
        (HEAD.replace("score", "target") + RATING, "the other families take none"),
        (HEAD.replace("score", "scroe") + RATING, "family 'scroe' is unknown; did you mean 'score'?"),
        (HEAD.replace("= 1", "= 2") + RATING, "version must be 1, got 2."),
        ("", "version is missing."),
    ],
)
def test_a_wrong_name_or_combination_is_refused_with_its_place(tmp_path: Path, text: str, part: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith("FILE: ")
    assert part in message


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('threshold = "7"', 'judges.0.rating.threshold must be a number, got "7".'),
        ("threshold = true", "judges.0.rating.threshold must be a number, got true."),
        ("threshold = 10", "judges.0.rating.threshold must be at most 9, got 10."),
        ("threshold = nan", "judges.0.rating.threshold must be a finite number, got nan."),
        ("threshold = -inf", "judges.0.rating.threshold must be a finite number, got -inf."),
        ("[salvage]\nmin_logprob = -inf", "salvage.min_logprob must be a finite number, got -inf."),
        ("[step]\ndraft_deadline_s = inf", "step.draft_deadline_s must be a finite number, got inf."),
        ('[step]\nmax_step_tokens = "512"', 'step.max_step_tokens must be a whole number, got "512".'),
        ("[step]\nmax_step_tokens = true", "step.max_step_tokens must be a whole number, got true."),
        ("[step]\nmax_step_tokens = 0", "step.max_step_tokens must be at least 1, got 0."),
        ("[step]\ndelimiter = 3", "step.delimiter must be text in quotes, got 3."),
        ('[step]\ndelimiter = ""', "step.delimiter must not be empty."),
        ("[salvage]\nmin_logprob = 1", "salvage.min_logprob must be at most 0, got 1."),
        ("[token]\nnum_tokens = 2.5", 'token.num_tokens: it must be "auto" or a whole number from 1 to 64'),
        ("[token]\nnum_tokens = 65", 'token.num_tokens: it must be "auto" or a whole number from 1 to 64'),
        ('[token]\ndrafter = "sufix"', "token.drafter 'sufix' is unknown; did you mean 'suffix'? Known: "),
        ('[token]\ndrafter = "medusa"', "token.drafter 'medusa' is unknown. Known: "),
        ("[token]\nthreshold = 2", "token.threshold must be at most 1, got 2."),
        ("[token]\nwindow = 64", "token.window must be below 64, got 64."),
        ("[token]\nentropy = -1", "token.entropy must be at least 0, got -1."),
        ('[token]\nacceptance = "fli"', "token.acceptance 'fli' is unknown; did you mean 'fly'? Known: "),
        ("[token]\nhint = false", "There is no key 'hint'. Known: acceptance, drafter, "),
        ("[token]\ntolerance = 0.1", 'token: tolerance is now acceptance = "typical" with threshold, or "exact"'),
        ("[token]\nthreshold = 0.5", "token: Acceptance 'exact' does not use threshold."),
        ("[token]\nexact_digits = true", "token: Acceptance 'exact' does not use exact_digits, "),
        ('[token]\nacceptance = "ratio"\nthreshold = 0.1', "token: Acceptance 'ratio' needs a drafter, got 'none'."),
        (SUFFIX + 'acceptance = "ratio"', "token: Acceptance 'ratio' needs threshold."),
        (
            SUFFIX + 'acceptance = "ratio"\nthreshold = 0.1\nwindow = 2',
            "token: Acceptance 'ratio' does not use window.",
        ),
        (SUFFIX + 'acceptance = "fly"\nwindow = 2', "token: Acceptance 'fly' needs entropy."),
        (
            SUFFIX + 'acceptance = "fly"\nwindow = 6\nentropy = 0.3\nnum_tokens = 6',
            "token: A window of 6 needs more than 6 drafted tokens, got 6.",
        ),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(tmp_path: Path, line: str, where: str) -> None:
    assert refusal(tmp_path, HEAD + RATING + line).startswith(f"FILE: {where}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD + '[judges]\nkind = "rating"', "judges must be tables: [[judges]]."),
        (HEAD + 'judges = ["rating"]', "judges must be tables: [[judges]]."),
        (HEAD + 'judges = "rating"', "judges must be tables: [[judges]]."),
        ('step = "x"\n' + HEAD + RATING, 'step must be a table: [step], got "x".'),
        ("salvage = true\n" + HEAD + RATING, "salvage must be a table: [salvage], got true."),
        (HEAD.replace("= 1", "= true") + RATING, "version must be a whole number, got true."),
        (HEAD.replace("= 1", "= 1.0") + RATING, "version must be a whole number, got 1.0."),
        ("a = " + "[" * 200_000, "is nested too deeply"),
    ],
)
def test_a_value_that_is_no_table_or_number_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, text)


JUNK: list[Any] = [True, -1, 10**30, 0.5, -math.inf, math.nan, "x", "", [], [1], ["x"], [{}], {}, {"kind": "x"}]
JUNK += [datetime.date(2026, 1, 1)]
PRICES = 'currency = "EUR"\nper_machine_hour = 1.0\n[per_million.target]\ninput = 1\noutput = 1'
FILES: list[tuple[type[FileModel], Any]] = [(Prices, tomllib.loads(PRICES))]
FILES += [(Policy, tomllib.loads(file.read_text("utf-8"))) for file in list_data_files("policies").values()]
FILES += [(Benchmark, tomllib.loads(file.read_text("utf-8"))) for file in list_data_files("evals").values()]


def changed(found: Any, path: list[int], junk: Any) -> Any:
    """Return a copy with one value replaced by `junk`; the numbers in `path` select the key at each level."""
    if not path or not isinstance(found, dict | list) or not found:
        return junk
    keys: list[Any] = list(found) if isinstance(found, dict) else list(range(len(found)))
    copy: Any = found.copy()
    copy[keys[path[0] % len(keys)]] = changed(copy[keys[path[0] % len(keys)]], path[1:], junk)
    return copy


@settings(max_examples=400, database=None)
@given(st.sampled_from(FILES), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from(JUNK))
def test_whatever_stands_wherever_in_a_file_is_taken_or_refused_in_one_plain_sentence(
    file: tuple[type[FileModel], Any], path: list[int], junk: Any
) -> None:
    model, fields = file
    try:
        found = model.model_validate(changed(fields, path, junk))
    except ValidationError as error:
        sentence = first_problem(error, model)
        assert sentence.endswith((".", ")"))
        assert "\n" not in sentence
        assert not re.search("Input|Field required|[Dd]iscriminator|valid|None", sentence), sentence
    else:
        assert "inf" not in repr(found)


def test_a_whole_number_is_a_number_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(HEAD + RATING + "threshold = 3", "utf-8")
    (judge,) = load_policy(str(file))[0].judges
    assert judge == RatingJudge(kind="rating", threshold=3.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version = ", "is not valid TOML"),
        (b"version = 1\nversion = 1", "is not valid"),
        (b"\xff\xfe", "Cannot read"),
        (b".".join([b"a"] * 200_000) + b" = 1", "line 1 has more than 100 periods in a row"),
        (b"[" + b".".join([b'"a"'] * 200_000) + b"]", "line 1 has more than 100 periods in a row"),
        (b'a."#".' + b".".join([b"a"] * 200) + b" = 1", "line 1 has more than 100 periods in a row"),
        ('a."\u2028".'.encode() + b".".join([b"a"] * 200) + b" = 1", "line 1 has more than 100 periods in a row"),
        (b'\nx = {y = """a"""", ' + b".".join([b"a"] * 200) + b" = 1}", "line 2 has more than 100 periods in a row"),
        (b"x = 1\n# " + b"a" * 1_000_000, "more than 1,000,000 bytes"),
        (b"# " + "\u00e9".encode() * 600_000 + b"\nx = 1", "more than 1,000,000 bytes"),
        (b"x = " + b"1" * 5_000, "is not valid TOML"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_policy(str(file))
    assert str(file) in str(caught.value)


def test_periods_in_texts_and_comments_are_no_parts_of_a_key() -> None:
    dots = "." * 300
    text = f"x = \"\"\"\n{dots}\\\"{dots}\"\"\"\" # {dots}\n'y{dots}' = '''{dots}\n'''\n# {dots}"
    assert parse_toml(text) == {"x": f'{dots}"{dots}"', f"y{dots}": f"{dots}\n"}


def test_a_string_that_never_ends_is_refused_in_time_that_grows_with_its_length() -> None:
    for text in ('"' + '\\"' * 400_000, 'x = """' + '\\"""' * 200_000 + "\\"):
        with pytest.raises(ValueError, match="string"):
            parse_toml(text)


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


def test_a_table_or_a_key_without_effect_is_refused() -> None:
    head = {"version": 1, "summary": "x"}
    for wrong, message in [
        ({"family": "target", "first_target_steps": 3}, "first_target_steps has no effect in family 'target'"),
        ({"family": "route", "judging": "cascade"}, "judging has no effect in family 'route'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Policy.model_validate(head | wrong)
