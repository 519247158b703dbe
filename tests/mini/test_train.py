"""Training: deepening keeps the function, a resumed run gives the same weights, and the losses fall."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from evals.training import muon, train
from evals.training.batches import Batches, collate
from evals.training.gsm_mini import NAMES, train_problem
from evals.training.proposals import load_proposals
from evals.training.recipes import RECIPES, Recipe, Stage
from evals.training.tokenizer import load_tokenizer
from evals.training.train import (
    Heads,
    Trainer,
    build_model,
    deepen,
    learning_rate_factor,
    losses_of,
    totals_of,
)
from stepspec.mini import WEIGHTS

SMALL = Recipe(
    width=32,
    feed_forward=64,
    heads=2,
    kv_heads=1,
    head_size=16,
    stages=(Stage(1, 6, max_level=3, batch=2), Stage(2, 6, rates=(1.0, 0.0), judged=0.7, batch=2)),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(train, "SAVE_EVERY", 3)
    monkeypatch.setattr(train, "LOG_EVERY", 3)
    monkeypatch.setattr(train, "NUM_PROPOSED", 2)
    monkeypatch.setattr(train, "solve_rate", lambda *_: 0.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(WEIGHTS / "target")


def trainer(folder: Path, recipe: Recipe = SMALL) -> Trainer:
    """Return a trainer whose folder has the tokenizer and the draft of the embedded pair."""
    for role in ("target", "draft"):
        if not (folder / role).exists():
            (folder / role).mkdir(parents=True)
            names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
            for name in (*names, "config.json", "model.safetensors") if role == "draft" else names:
                (folder / role / name).write_bytes((WEIGHTS / role / name).read_bytes())
    (folder / "checkpoints").mkdir(exist_ok=True)
    return Trainer("target", recipe, 0, folder, folder / "checkpoints", "cpu")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "target").state_dict()


def test_a_killed_and_resumed_run_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path / "whole").run()
    step = Trainer._step
    for count in (4, 2, 3):  # in stage 1, before the next checkpoint, in stage 2
        done = itertools.count()

        def dying(*arguments, last: int = count, done=done):
            if next(done) == last:
                raise KeyboardInterrupt
            return step(*arguments)

        monkeypatch.setattr(Trainer, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path / "killed").run()
    monkeypatch.setattr(Trainer, "_step", step)
    trainer(tmp_path / "killed").run()
    whole, killed = (weights_in(tmp_path / name) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    log = [json.loads(line) for line in (tmp_path / "killed/checkpoints/target.jsonl").read_text().splitlines()]
    assert {"stage", "step", "seconds", "targets"} <= log[-1].keys()


def test_the_loss_falls(tmp_path: Path) -> None:
    trainer(tmp_path, replace(SMALL, stages=(Stage(1, 60, max_level=3, batch=8),))).run()
    log = [json.loads(line) for line in (tmp_path / "checkpoints/target.jsonl").read_text().splitlines()]
    assert log[-1]["targets"] < 0.7 * log[0]["targets"]


def test_a_deepened_model_computes_the_same_function(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    shallow = build_model(SMALL, 1, tokenizer)
    deep = deepen(shallow, SMALL, 3, tokenizer)
    ids = torch.randint(500, (2, 30))
    with torch.no_grad():
        assert torch.allclose(shallow(ids).logits, deep(ids).logits, atol=1e-5)
    assert deep.config.num_hidden_layers == 3


def test_batches_depend_only_on_their_number(tokenizer: PreTrainedTokenizerFast) -> None:
    stage = Stage(1, 100, judged=0.5, batch=2)
    maker = train.SequenceMaker(tokenizer, "target")
    from_the_start = list(itertools.islice(Batches(maker, stage, "seed", 0, 1), 12))
    later = list(itertools.islice(Batches(maker, stage, "seed", 9, 1), 3))
    for one, other in zip(from_the_start[9:], later, strict=True):
        assert len(one) == len(other) == 2
        for part, other_part in zip(one, other, strict=True):
            assert all(torch.equal(part[name], other_part[name]) for name in part)


def test_the_losses_of_the_parts_add_up_to_those_of_the_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model, heads = build_model(SMALL, 9, tokenizer), Heads(SMALL.width)
    maker = train.SequenceMaker(tokenizer, "target")
    sums = []
    for together in (12, 5):
        stage = Stage(9, 8, judged=1.0, guided=True, batch=12)
        batch = next(iter(Batches(maker, stage, "seed", 0, together)))
        totals = totals_of(batch, 3.0)
        assert totals.keys() == {"targets", "verdicts", *train.TAPPED_LAYERS, *train.TAUGHT_LAYERS}
        losses = [losses_of(model, heads, part, 3.0, totals) for part in batch]
        sums.append({name: sum(each[name].item() for each in losses) for name in totals})
    assert sums[0] == pytest.approx(sums[1], rel=1e-2)


def test_attention_labels_point_to_the_owner_and_the_source_of_a_number(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    maker = train.SequenceMaker(tokenizer, "target")
    names = torch.tensor([maker.encode(f" {name}")[0] for name in NAMES])
    found = 0
    for number in range(20):
        sequence = maker.make(train_problem(number), random.Random(number), drills=2)
        batch = collate([sequence], names)
        owners, sources, visible = batch["owners"][0], batch["sources"][0], batch["mask"][0, 0] == 0
        assert not ((owners | sources) & ~visible).any()
        assert owners.sum(-1).max() == 1
        for at, name in owners.nonzero().tolist():
            assert sequence.ids[name] in names
            assert not torch.isin(torch.tensor(sequence.ids[name + 1 : at + 1]), names).any(), "the nearest name"
        for at, source in sources.nonzero().tolist():
            assert sequence.ids[source] == sequence.targets[at]
            name = int(owners[at].nonzero())
            span = sequence.ids[name : at + 1]
            assert sequence.ids[source - len(span) : source] == span, "the same name, followed by the same tokens"
        found += int(sources.any(-1).sum())
    assert found > 20 * 15


def test_the_onset_of_a_flaw_is_a_separate_label(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    maker = train.SequenceMaker(tokenizer, "target")
    for number in range(20):
        sequence = maker.make(train_problem(number), random.Random(number), judged=True)
        batch = collate([sequence])
        onsets, flaws, differences = (batch[name][0] for name in ("onsets", "flaws", "differences"))
        assert (flaws[: sequence.segments.index(1)] == -100).all(), "the trunk is right and has no labels"
        for at in (onsets == 1).nonzero()[:, 0].tolist():
            labels = flaws if flaws[at] == 1 else differences
            assert labels[at - 1 : at + 1].tolist() == [0, 1]
        assert ((onsets == 0) == ((flaws == 0) | (differences == 0))).all()


def test_the_learning_rate_warms_up_and_then_changes_linearly() -> None:
    stage = Stage(1, 1000, rates=(1.0, 0.5))
    factors = [learning_rate_factor(step, stage) for step in range(1000)]
    assert factors[0] == pytest.approx(0.01)
    assert factors[500] == pytest.approx(0.75)
    assert factors == sorted(factors[:100]) + sorted(factors[100:], reverse=True)


def test_proposals_are_the_drafts_own_steps_with_the_oracles_verdict(tmp_path: Path) -> None:
    path = tmp_path / "proposals.jsonl"
    proposals = load_proposals(WEIGHTS / "draft", path, 6, "cpu")
    assert proposals == load_proposals(tmp_path / "nowhere", path, 6, "cpu"), (
        "proposals in the file are not generated again"
    )
    verdicts = [right for steps in proposals.values() for _, _, right in steps]
    assert len(verdicts) > 15
    assert sum(verdicts) > len(verdicts) / 2


def test_the_recipes_match_the_shipped_models() -> None:
    for role, recipe in RECIPES.items():
        config = AutoModelForCausalLM.from_pretrained(WEIGHTS / role).config
        assert (config.hidden_size, config.intermediate_size) == (recipe.width, recipe.feed_forward)
        assert config.num_hidden_layers == recipe.stages[-1].layers


def test_our_muon_takes_the_steps_of_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "COMPUTE_DTYPE", torch.bfloat16)  # which torch's always computes in
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(8, 20, generator=rng), torch.randn(20, 8, generator=rng)]
    gradients = [[torch.randn(each.shape, generator=rng) for each in start] for _ in range(3)]
    found: list[list[torch.nn.Parameter]] = []
    for kind in (muon.Muon, torch.optim.Muon):
        weights = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer = kind(weights, lr=0.05, momentum=0.9, weight_decay=0.1)
        for turn in gradients:
            for weight, gradient in zip(weights, turn, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        found.append(weights)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
