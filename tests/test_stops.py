"""The end of a generation: a delimiter, in one token or across several, an end token, or the token cap."""

import pytest

from stepspec.engines.protocol import Stop
from stepspec.engines.stops import StopMatcher

TOKENS = ["a", "\n", "\n\n", ".\n\n", "\n\nb", "<end>", "x<s", "tep", ">", "\ufffd"]
END = TOKENS.index("<end>")


def ends(tokens: list[str], stop: Stop, end_ids: frozenset[int] = frozenset({END})) -> list[str | None]:
    """Return the end that each token causes, up to the first that causes one."""
    watch = StopMatcher(stop, TOKENS.__getitem__, end_ids)
    found: list[str | None] = []
    for token in tokens:
        found.append(watch.feed(TOKENS.index(token)))
        if found[-1] is not None:
            break
    return found


@pytest.mark.parametrize("last", ["\n\n", ".\n\n", "\n\nb"])
def test_a_delimiter_is_found_alone_and_inside_a_token(last: str) -> None:
    assert ends(["a", last, "a"], Stop(10, ("\n\n",))) == [None, "delimiter"]


def test_a_delimiter_is_found_across_tokens() -> None:
    assert ends(["a", "\n", "\n", "a"], Stop(10, ("\n\n",))) == [None, None, "delimiter"]
    assert ends(["x<s", "tep", ">"], Stop(10, ("<step>",))) == [None, None, "delimiter"]


def test_a_delimiter_may_begin_before_the_generated_text() -> None:
    assert ends(["\n", "a"], Stop(10, ("\n\n",), before="a\n")) == ["delimiter"]
    assert ends(["a", "\n"], Stop(10, ("\n\n",), before="a\n")) == [None, None]


def test_two_halves_with_something_between_are_no_delimiter() -> None:
    assert ends(["\n", "a", "\n"], Stop(10, ("\n\n",))) == [None, None, None]


def test_any_of_several_delimiters_counts() -> None:
    stop = Stop(10, ("<step>", "\n"))
    assert ends(["a", "\n"], stop) == [None, "delimiter"]
    assert ends(["x<s", "tep", ">"], stop) == [None, None, "delimiter"]


def test_a_delimiter_of_one_character_is_found() -> None:
    assert ends(["a", "a", "\n"], Stop(10, ("\n",))) == [None, None, "delimiter"]


def test_the_model_s_own_end_and_the_caller_s_tokens_end_a_generation() -> None:
    assert ends(["a", "<end>"], Stop(10)) == [None, "token"]
    assert ends(["a", ">"], Stop(10, token_ids=frozenset({TOKENS.index(">")}))) == [None, "token"]


def test_the_cap_ends_it_with_the_token_that_reaches_it() -> None:
    assert ends(["a", "a", "a"], Stop(2)) == [None, "length"]
    assert ends(["a", "a", "a"], Stop(2, ("\n\n",))) == [None, "length"]


def test_at_the_cap_a_delimiter_or_an_end_token_is_the_reason() -> None:
    assert ends(["a", "\n\n"], Stop(2, ("\n\n",))) == [None, "delimiter"]
    assert ends(["a", "<end>"], Stop(2, ("\n\n",))) == [None, "token"]


def test_an_end_token_that_completes_a_delimiter_is_an_end_token() -> None:
    assert ends(["a", "\n\n"], Stop(9, ("\n\n",)), frozenset({TOKENS.index("\n\n")})) == [None, "token"]


def test_remaining_counts_down_to_the_cap() -> None:
    watch = StopMatcher(Stop(3), TOKENS.__getitem__, frozenset())
    assert watch.remaining == 3
    watch.feed(0)
    assert watch.remaining == 2
