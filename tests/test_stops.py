"""The end of a generation: a delimiter however it is spread over tokens, an end token, or the cap."""

import pytest

from stepspec.engines.protocol import Stop
from stepspec.engines.stops import StopWatch

PIECES = ["a", "\n", "\n\n", ".\n\n", "\n\nb", "<end>", "x<s", "tep", ">", "\ufffd"]
END = PIECES.index("<end>")


def ends(pieces: list[str], stop: Stop, end_ids: frozenset[int] = frozenset({END})) -> list[str | None]:
    """What each piece ends, up to the first that ends something."""
    watch = StopWatch(stop, PIECES.__getitem__, end_ids)
    found: list[str | None] = []
    for piece in pieces:
        found.append(watch.feed(PIECES.index(piece)))
        if found[-1] is not None:
            break
    return found


@pytest.mark.parametrize("last", ["\n\n", ".\n\n", "\n\nb"])
def test_a_delimiter_is_seen_alone_and_inside_a_token(last: str) -> None:
    assert ends(["a", last, "a"], Stop(10, ("\n\n",))) == [None, "delimiter"]


def test_a_delimiter_is_seen_when_it_is_spread_over_tokens() -> None:
    assert ends(["a", "\n", "\n", "a"], Stop(10, ("\n\n",))) == [None, None, "delimiter"]
    assert ends(["x<s", "tep", ">"], Stop(10, ("<step>",))) == [None, None, "delimiter"]


def test_two_halves_with_something_between_are_no_delimiter() -> None:
    assert ends(["\n", "a", "\n"], Stop(10, ("\n\n",))) == [None, None, None]


def test_any_of_several_delimiters_counts() -> None:
    stop = Stop(10, ("<step>", "\n"))
    assert ends(["a", "\n"], stop) == [None, "delimiter"]
    assert ends(["x<s", "tep", ">"], stop) == [None, None, "delimiter"]


def test_a_delimiter_of_one_character_remembers_nothing() -> None:
    assert ends(["a", "a", "\n"], Stop(10, ("\n",))) == [None, None, "delimiter"]


def test_the_model_s_own_end_and_the_caller_s_tokens_end_a_generation() -> None:
    assert ends(["a", "<end>"], Stop(10)) == [None, "token"]
    assert ends(["a", ">"], Stop(10, token_ids=frozenset({PIECES.index(">")}))) == [None, "token"]


def test_the_cap_ends_it_with_the_token_that_reaches_it() -> None:
    assert ends(["a", "a", "a"], Stop(2)) == [None, "length"]
    assert ends(["a", "a", "a"], Stop(2, ("\n\n",))) == [None, "length"]


def test_at_the_cap_the_better_reason_is_given() -> None:
    assert ends(["a", "\n\n"], Stop(2, ("\n\n",))) == [None, "delimiter"]
    assert ends(["a", "<end>"], Stop(2, ("\n\n",))) == [None, "token"]


def test_an_end_token_that_completes_a_delimiter_is_an_end_token() -> None:
    assert ends(["a", "\n\n"], Stop(9, ("\n\n",)), frozenset({PIECES.index("\n\n")})) == [None, "token"]


def test_remaining_counts_down_to_the_cap() -> None:
    watch = StopWatch(Stop(3), PIECES.__getitem__, frozenset())
    assert watch.remaining == 3
    watch.feed(0)
    assert watch.remaining == 2
