"""A draft with a draft vocabulary drafts only its ids, and the target's text is unchanged."""

import json
from pathlib import Path

import pytest
import torch
from distributions import FALSE_ALARM, conditional_distributions, joint_distribution, p_value, sample_texts
from tiny_models import (
    DRAFTED,
    VOCAB_SIZE,
    generate,
    llama_config,
    make_config,
    make_model,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
    slow_logits,
)

from evals.bench.hooks import read_bytes
from stepspec.engines.draft_vocabulary import FILE, load_draft_vocabulary
from stepspec.engines.hugging_face import weights_hash
from stepspec.engines.protocol import Sampling
from stepspec.engines.torch_engine.drafters.draft_model import DraftModel
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.errors import ModelError

pytestmark = pytest.mark.anyio

SOME = (1, 2, 5, 8, 13, 21, 34)


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "gpt2"])
@torch.inference_mode()
def test_only_ids_of_the_draft_vocabulary_have_logits(family: str) -> None:
    network, ids = make_network(make_config(family)), random_ids(9)
    expected = slow_logits(network, ids)
    (found,) = checked_model(network, "tiny", SOME).extend([0], [ids])
    assert torch.allclose(found[:, SOME], expected[:, SOME], atol=1e-4)
    others = [id for id in range(VOCAB_SIZE) if id not in SOME]
    assert found[:, others].isneginf().all()


@pytest.mark.parametrize("vocabulary", [SOME, tuple(range(0, VOCAB_SIZE, 2)), (7,)], ids=len)
async def test_greedy_text_may_have_ids_outside_the_draft_vocabulary(vocabulary: tuple[int, ...]) -> None:
    network, prompt = make_network(llama_config()), random_ids(12)
    expected = slow_greedy(network, prompt, 60)
    assert set(expected) - set(vocabulary), "the draft vocabulary has every id of the text"
    draft = checked_model(noisy_copy(network, 0.1), "draft", vocabulary)
    async with serving(make_model(network), draft) as engine:
        chunk = await generate(engine, prompt, 60, drafting=DRAFTED)
    assert list(chunk.ids) == expected
    assert chunk.drafted


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(1.0, seed=3, allowed=frozenset({2, 3, 4}))], ids=str
)
async def test_a_model_with_a_draft_vocabulary_writes_only_its_ids(sampling: Sampling) -> None:
    async with serving(checked_model(make_network(llama_config()), "draft", SOME)) as engine:
        chunk = await generate(engine, random_ids(12), 40, sampling=sampling)
    assert set(chunk.ids) <= set(SOME) & (sampling.allowed or set(SOME))


@pytest.mark.parametrize("num_texts", [2000, pytest.param(6000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("vocabulary", "sampling"),
    [
        ((0, 1, 3), Sampling(1.0)),
        ((2, 4), Sampling(0.7, top_p=0.85)),
        ((2,), Sampling(1.0, allowed=frozenset({0, 1, 3}))),
    ],
)
def test_sampled_texts_have_the_targets_distribution(
    vocabulary: tuple[int, ...], sampling: Sampling, num_texts: int
) -> None:
    """This holds even if no allowed token is in the draft's vocabulary (chi-square, `FALSE_ALARM`)."""
    target = make_network(llama_config(vocab_size=5, initializer_range=0.1), seed=3)
    model, prompt = make_model(target), [1, 4, 2, 1, 1, 4, 2]
    draft = DraftModel(checked_model(noisy_copy(target, 0.4), "draft", vocabulary), model.vocab_size, 500)
    texts, _ = sample_texts(model, draft, prompt, sampling, num_texts, depth=2)
    assert p_value(texts, joint_distribution(conditional_distributions(target, prompt, 2, sampling))) > FALSE_ALARM


def test_a_pass_reads_only_the_scored_rows_of_the_head() -> None:
    network = make_network(llama_config())
    row = network.get_output_embeddings().weight[0].nbytes
    full, some = checked_model(make_network(llama_config()), "whole"), checked_model(network, "some", SOME)
    assert read_bytes(full) - read_bytes(some) == (VOCAB_SIZE - len(SOME)) * row


def test_the_vocabulary_file_is_read_and_changes_the_weights_hash(tmp_path: Path) -> None:
    make_network(llama_config()).save_pretrained(tmp_path)
    before = weights_hash(str(tmp_path))
    assert load_draft_vocabulary(tmp_path, VOCAB_SIZE) is None
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "ids": [5, 2, 5]}))
    assert load_draft_vocabulary(tmp_path, VOCAB_SIZE) == (2, 5)
    assert weights_hash(str(tmp_path)) != before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Invalid JSON"),
        ("[1, 2]", "object"),
        ('{"version": 2, "ids": [1]}', "Input should be 1"),
        ('{"version": 1, "ids": []}', "at least 1 item"),
        ('{"version": 1, "ids": [1.5]}', "integer"),
        ('{"version": 1, "ids": [-1]}', "greater than or equal to 0"),
        ('{"version": 1, "ids": [47, 48]}', "the model has 48 tokens"),
        ('{"version": 1, "ids": [1], "name": "x"}', "Extra inputs"),
    ],
)
def test_an_invalid_vocabulary_file_is_rejected(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ModelError, match=reason):
        load_draft_vocabulary(tmp_path, VOCAB_SIZE)
