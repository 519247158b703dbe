"""The controller's tokenizers, compared with those of transformers."""

import asyncio
import json
import time

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import TokenizersBackend

from stepspec.base.files import package_folder
from stepspec.base.workers import off_the_loop
from stepspec.engines.hugging_face import HuggingFaceTokenizer, load_tokenizer, most_bytes

EMBEDDED = load_tokenizer(str(package_folder() / "mini" / "weights" / "target"))
MARKED = st.lists(st.sampled_from(["<|end|>", "</think>", "<", "|", "think", "a b", "12", "é漢😀", "\n\n", " "])).map(
    "".join
)


def byte_level(normalizer: object = None) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes and a few longer tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "he", "ll", "hell", "hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    found = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if normalizer is not None:
        found.normalizer = normalizer  # type: ignore[assignment]
    return found


def described(tokenizer: tokenizers.Tokenizer) -> int | None:
    return most_bytes(json.loads(tokenizer.to_str()))


@settings(max_examples=100)
@given(st.text() | MARKED)
@example("")
def test_ids_are_those_of_transformers(text: str) -> None:
    own = EMBEDDED.own
    assert EMBEDDED.encode(text) == own.encode(text, add_special_tokens=False)
    assert EMBEDDED.encode_text(text) == own.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert bool(EMBEDDED.special_spans(text)) == (EMBEDDED.encode(text) != EMBEDDED.encode_text(text))


@settings(max_examples=100)
@given(st.text() | MARKED | st.text("helo \u1100\u1161\u11a8\u0301", max_size=50))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(text: str) -> None:
    composing = byte_level(normalizers.NFC())
    for encode, most in (
        (EMBEDDED.encode, EMBEDDED.max_token_bytes),
        (lambda text: byte_level().encode(text).ids, described(byte_level())),
        (lambda text: composing.encode(text).ids, described(composing)),
    ):
        assert most is not None
        assert len(encode(text)) * most >= len(text.encode())


def test_tokens_of_unlimited_length_give_no_bound() -> None:
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    dropping = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    stripping = byte_level(normalizers.Strip())
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    splitting = byte_level()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    for tokenizer in (words, unigram, dropping, stripping, swallowing, splitting):
        assert described(tokenizer) is None


def with_normalized_token(content: str) -> HuggingFaceTokenizer:
    own = TokenizersBackend(tokenizer_object=byte_level(normalizers.Lowercase()))
    own.add_special_tokens({"additional_special_tokens": [AddedToken(content, normalized=True)]})
    return HuggingFaceTokenizer(own, frozenset())


@pytest.mark.parametrize("content", ["<end>", "<End>"])
def test_special_tokens_that_appear_after_normalization_are_found(content: str) -> None:
    tokenizer = with_normalized_token(content)
    for text in ("a<END>", "a<end>", "<end><END>"):
        assert tokenizer.special_spans(text)
        assert tokenizer.encode(text) != tokenizer.encode_text(text)
    assert not tokenizer.special_spans("a<EN>")
    assert tokenizer.special_edges("<E") == (False, True)


def test_a_special_token_in_its_own_form_leaves_the_text_around_it_whole() -> None:
    assert with_normalized_token("<end>").special_spans("Hello<end>hello<end>") == [(5, 10), (15, 20)]


def test_text_beside_a_special_token_is_examined_in_linear_time() -> None:
    """Values of a request must not fill a cache or compile a pattern each."""
    edges, begin = set[tuple[bool, bool]](), time.process_time()
    for number in range(20_000):
        edges.add(EMBEDDED.special_edges(f"v{number}"))
    assert not EMBEDDED.special_spans("<" * 100_000)
    assert (edges, time.process_time() - begin < 1) == ({(False, False)}, True)
    assert EMBEDDED.special_edges("think") == EMBEDDED.special_edges("|") == (True, True)
    assert EMBEDDED.special_edges("hink") == (False, False)


def test_the_event_loop_runs_while_long_texts_are_encoded() -> None:
    text = "hello there friend " * 30_000

    async def longest_gap() -> float:
        gaps, last = list[float](), time.perf_counter()
        work = asyncio.ensure_future(off_the_loop(text, lambda: EMBEDDED.encode(text)))
        begin = last
        while not work.done():
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
        return max(gaps) / (last - begin)

    # A busy machine can delay the loop at any time; an encoding that holds the interpreter lock delays it every time.
    assert any(asyncio.run(longest_gap()) < 1 / 2 for _ in range(5))


@pytest.mark.parametrize("text", ["a", "a" * 20_000])
def test_threads_may_encode_concurrently_with_and_without_special_tokens(text: str) -> None:
    marked, plain = EMBEDDED.encode("<|end|>" + text), EMBEDDED.encode_text("<|end|>" + text)

    async def both() -> None:
        work = [
            asyncio.to_thread(each, "<|end|>" + text)
            for _ in range(20)
            for each in (EMBEDDED.encode, EMBEDDED.encode_text)
        ]
        assert await asyncio.gather(*work) == [marked, plain] * 20

    asyncio.run(both())
