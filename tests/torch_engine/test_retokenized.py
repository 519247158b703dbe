"""A draft model with another vocabulary drafts text. The output is the target's own, token for token."""

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB_SIZE, llama_config, make_model, make_network, piece, random_ids, slow_greedy
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine.engine import TorchEngine

pytestmark = pytest.mark.anyio

ORDER = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).tolist()
"""The draft's id of each of the target's tokens."""
PROMPTS = [random_ids(length, seed=length) for length in (3, 11, 1, 30)]
NUM_NEW = 24


def tokenizer_of(ids: Sequence[int]) -> HuggingFaceTokenizer:
    """Return a tokenizer with these ids of the tokens."""
    own = Tokenizer(WordLevel({piece(token): id for token, id in enumerate(ids)}, unk_token=piece(0)))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"\(.\)"), behavior="isolated")
    own.decoder = decoders.Fuse()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=own), frozenset())


@torch.no_grad()
def reordered(network: PreTrainedModel) -> PreTrainedModel:
    """Return the same network for the draft's ids."""
    copied = copy.deepcopy(network)
    places = torch.tensor(ORDER)
    for rows in (copied.get_input_embeddings().weight, copied.get_output_embeddings().weight):
        rows[places] = rows.clone()
    return copied


@asynccontextmanager
async def drafted(
    target: PreTrainedModel, draft: PreTrainedModel, *, by_slot: bool = False
) -> AsyncIterator[TorchEngine]:
    """Yield the target's engine with the draft's model as its drafter."""
    models = [make_model(target, "target", by_slot=by_slot), make_model(draft, "draft", by_slot=by_slot)]
    one, other = TorchEngine(models[0], tokenizer_of(range(VOCAB_SIZE))), TorchEngine(models[1], tokenizer_of(ORDER))
    engine = one.drafted_by(other)
    try:
        yield engine
    finally:
        await engine.aclose()
        await other.aclose()


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, None])
@pytest.mark.parametrize("same", [True, False], ids=["the target in other ids", "another network"])
async def test_the_output_is_the_target_s(same: bool, num_tokens: int | None, by_slot: bool) -> None:
    network = make_network(llama_config())
    draft = reordered(network) if same else make_network(llama_config(), seed=7)
    async with drafted(network, draft, by_slot=by_slot) as engine:
        calls = [
            Generate(TokenBuffer(prompt), Sampling(), Stop(NUM_NEW), Drafting("draft-model", num_tokens))
            for prompt in PROMPTS
        ]
        chunks = await asyncio.gather(*(collect(engine.generate(call)) for call in calls))
        assert [list(chunk.ids) for chunk in chunks] == [slow_greedy(network, prompt, NUM_NEW) for prompt in PROMPTS]
        proposed, accepted = (sum(getattr(chunk, name) for chunk in chunks) for name in ("drafted", "accepted"))
        if num_tokens is not None:
            assert accepted == proposed > 0 if same else accepted < 0.4 * proposed


async def test_a_text_that_goes_on_in_further_calls_is_read_once() -> None:
    network = make_network(llama_config())
    buffer, expected = TokenBuffer(PROMPTS[1]), slow_greedy(network, PROMPTS[1], NUM_NEW)
    async with drafted(network, reordered(network)) as engine:
        for start in range(0, NUM_NEW, 6):
            call = Generate(buffer, Sampling(), Stop(6), Drafting("draft-model", 3))
            chunk = await collect(engine.generate(call))
            assert list(chunk.ids) == expected[start : start + 6]
            assert chunk.accepted == chunk.drafted > 0
            buffer.append(chunk.ids)


async def test_a_text_of_another_group_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    network, read = make_network(llama_config()), list[int]()
    async with drafted(network, reordered(network)) as engine:
        drafter = engine._drafter
        assert drafter is not None
        extend = drafter.extend

        def counting(slots: Sequence[int], ids: Sequence[Sequence[int]], **options: object) -> object:
            read.append(sum(map(len, ids)))
            return extend(slots, ids, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(drafter, "extend", counting)
        for group, goes_on in (("a", False), ("a", True), ("b", False), (None, False), ("b", True)):
            read.clear()
            call = Generate(TokenBuffer(PROMPTS[3], group=group), Sampling(), Stop(3), Drafting("draft-model", 1))
            await collect(engine.generate(call))
            assert (sum(read) < len(PROMPTS[3])) == goes_on


async def test_sampled_output_is_the_same_with_and_without_drafts() -> None:
    """A guess without a distribution is accepted where the target samples the same token."""
    network = make_network(llama_config())
    async with drafted(network, reordered(network)) as engine:
        for seed in range(5):
            call = Generate(TokenBuffer(PROMPTS[3]), Sampling(1.0, seed=seed), Stop(12))
            drafters = (Drafting(), Drafting("draft-model", 4))
            plain, guessed = [await collect(engine.generate(replace(call, drafting=each))) for each in drafters]
            assert plain.ids == guessed.ids
