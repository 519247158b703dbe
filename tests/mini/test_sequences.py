"""Training sequences: the learned tokens, and branches with exactly the tokens of the engine's probes."""

import itertools
import random
import re
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from evals.training.batches import collate
from evals.training.gsm_mini import NAMES, Problem, step_content, train_problem, true_values
from evals.training.oracle import Oracle
from evals.training.selection import SELECTION_NAMES, SELECTION_PROMPT
from evals.training.sequences import LONG_ENOUGH, NOT_LEARNED, SequenceMaker, TreeSequence
from evals.training.tokenizer import load_tokenizer
from evals.training.wording import RATINGS
from stepspec.chat.prompts import (
    EQUIVALENCE_PROMPT,
    YES_NO_PROMPT,
    render_probe,
)
from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.mini import WEIGHTS

NUM_PROBLEMS = 60


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(WEIGHTS / "target")


@pytest.fixture(scope="module")
def maker(tokenizer: PreTrainedTokenizerFast) -> SequenceMaker:
    return SequenceMaker(tokenizer, "target")


@pytest.fixture(scope="module")
def judged(maker: SequenceMaker) -> list[tuple[Problem, TreeSequence]]:
    rng = random.Random(0)
    problems = [train_problem(number) for number in range(NUM_PROBLEMS)]
    return [(problem, maker.make(problem, rng, mixed=True, judged=True)) for problem in problems]


def branches(sequence: TreeSequence) -> list[list[int]]:
    """Return the token indices of each segment except the trunk."""
    groups = itertools.groupby(range(len(sequence.ids)), key=sequence.segments.__getitem__)
    return [list(group) for _, group in groups][1:]


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_only_model_output_is_learned_and_each_target_is_the_next_token(
    maker: SequenceMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    problem = train_problem(1)
    sequence = maker.make(problem, random.Random(0))
    learned = [index for index, target in enumerate(sequence.targets) if target != NOT_LEARNED]
    assert all(sequence.targets[index] == sequence.ids[index + 1] for index in learned)
    text = text_of(tokenizer, [sequence.targets[index] for index in learned])
    assert text.count("\n\n") == problem.level
    assert text.endswith(f"\n\n</think>The answer is \\boxed{{{problem.answer}}}.<|end|>")
    assert text_of(tokenizer, sequence.ids).endswith("<|assistant|><think>" + text)


def test_steps_in_the_other_voice_are_read_but_not_learned(maker: SequenceMaker) -> None:
    problem, rng = train_problem(2), random.Random(0)
    plain = [maker.make(problem, rng).targets for _ in range(20)]
    mixed = [maker.make(problem, rng, mixed=True).targets for _ in range(20)]
    shares = [sum(target != NOT_LEARNED for each in kind for target in each) for kind in (plain, mixed)]
    assert 0.35 < shares[1] / shares[0] < 0.75


def test_a_drill_states_values_known_where_it_leaves_the_trunk_or_practices_arithmetic(
    maker: SequenceMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    num_sums = 0
    for number in range(NUM_PROBLEMS):
        problem = train_problem(number)
        sequence = maker.make(problem, random.Random(number), drills=2)
        values = true_values(problem)
        for branch in branches(sequence):
            ids = [sequence.ids[index] for index in branch]
            text = text_of(tokenizer, ids)
            assert tokenizer.encode(text, add_special_tokens=False) == ids, (
                "must be the tokens of the text encoded as a whole"
            )
            learned = [index for index in branch if sequence.targets[index] != NOT_LEARNED]
            assert all(sequence.targets[index] == sequence.ids[index + 1] for index in learned)
            if equations := re.findall(r"(\d[\d+*/%of -]*) = (\d+)", text):
                num_sums += 1
                results = text_of(tokenizer, [sequence.targets[index] for index in learned])
                assert results == "".join(result for _, result in equations)
                assert all(eval(left.replace("% of", " / 100 *")) == int(result) for left, result in equations)
                continue
            trunk = text_of(tokenizer, sequence.ids[: sequence.cuts[branch[0]]]).partition("<think>")[2]
            derived = {relation.subject for relation in problem.plan[: trunk.count("\n\n")]}
            for name, relation in problem.relations.items():
                statement = f" {name} {problem.scene.verb} {values[name]},"
                assert (statement in text) <= (name in derived or relation.kind == "given")
            assert len(learned) >= len(branch) / 3
    assert 0.2 < num_sums / (2 * NUM_PROBLEMS) < 0.6


def test_only_wording_after_the_first_token_of_a_phrase_is_free(
    maker: SequenceMaker, tokenizer: PreTrainedTokenizerFast
) -> None:
    problem = train_problem(1)
    content = step_content(problem.scene, problem.plan[0], true_values(problem))
    for seed in range(50):
        marked = content.marked(random.Random(seed), "target")
        ids, free = maker.encode_marked(marked)
        step = content.word(random.Random(seed), "target")
        assert text_of(tokenizer, ids) == step
        assert len(free) == len(ids)
        required = {text_of(tokenizer, [id]).strip() for id, is_free in zip(ids, free, strict=True) if not is_free}
        assert {content.slots["S"], *content.slots["c"], "=", step.split()[0].rstrip(",:")} <= required
        chosen = {text_of(tokenizer, [id]).strip() for id, is_free in zip(ids, free, strict=True) if is_free}
        assert not chosen & {*"0123456789", *NAMES, "has", "picked", "fewer", "more", "sum", "than", "="}
        token_texts = [text_of(tokenizer, [id]).strip() for id in ids]
        behind = {before for before, is_free in zip(token_texts, free[1:], strict=False) if is_free}
        assert behind
        assert not behind & {*"0123456789", *NAMES}, "more required tokens can follow a digit or a name"


def test_whether_a_position_is_free_does_not_depend_on_its_token(maker: SequenceMaker) -> None:
    """Otherwise the model would overestimate tokens with a higher weight, such as the end of the reasoning."""
    problem = train_problem(1)
    content = step_content(problem.scene, problem.plan[0], true_values(problem))
    kinds: dict[tuple[int, ...], set[int]] = {}
    for seed in range(400):
        ids, free = maker.encode_marked(content.marked(random.Random(seed), "target"))
        for position, is_free in enumerate(free):
            kinds.setdefault(tuple(ids[:position]), set()).add(is_free)
    assert len(kinds) > 100
    assert all(len(kind) == 1 for kind in kinds.values())


def test_the_hardest_of_several_candidates_is_chosen(maker: SequenceMaker) -> None:
    def lookups(candidates: int) -> int:
        texts = [maker.draw(random.Random(seed), 10, False, False, candidates=candidates).ids for seed in range(100)]
        return sum(text_of(maker.tokenizer, ids).count(" together") for ids in texts)

    assert lookups(3) > 1.3 * lookups(1)


def test_every_step_is_judged_once_until_the_sequence_is_long(judged: list[tuple[Problem, TreeSequence]]) -> None:
    for problem, sequence in judged:
        answered = [index for index, verdict in enumerate(sequence.verdicts) if verdict != NOT_LEARNED]
        assert [branch[-1] for branch in branches(sequence)] == answered
        assert len(answered) == problem.level or len(sequence.ids) >= LONG_ENOUGH


def test_a_branch_continues_the_trunk_where_it_leaves_it(judged: list[tuple[Problem, TreeSequence]]) -> None:
    for _, sequence in judged:
        for branch in branches(sequence):
            (cut,) = {sequence.cuts[index] for index in branch}
            assert [sequence.positions[index] for index in branch] == list(range(cut, cut + len(branch)))


def test_verdicts_and_flaws_agree_with_the_oracle(
    judged: list[tuple[Problem, TreeSequence]], tokenizer: PreTrainedTokenizerFast, maker: SequenceMaker
) -> None:
    right_answers = {maker.answers["yes"], maker.answers["9"]}
    seen = {True: 0, False: 0}
    for problem, sequence in judged:
        oracle = Oracle(problem)
        for branch in branches(sequence):
            step, _, turn = text_of(tokenizer, [sequence.ids[index] for index in branch]).partition("<|end|>")
            if step and "these" not in turn:
                right = oracle.judge(step)
                assert (sequence.verdicts[branch[-1]] in right_answers) == right, step
                flaws = [sequence.flaws[index] for index in branch if sequence.flaws[index] != NOT_LEARNED]
                assert flaws == sorted(flaws), "a step that is wrong at one token stays wrong at all later ones"
                assert flaws[-1] == (not right)
                seen[right] += 1
    assert min(seen.values()) > NUM_PROBLEMS / 2


def test_judge_branches_have_exactly_the_tokens_that_the_engine_sends(
    judged: list[tuple[Problem, TreeSequence]], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Parts encoded separately for their labels must have the same tokens as the whole text."""
    engine_tokenizer = HuggingFaceTokenizer(tokenizer, frozenset())
    prompts = [*RATINGS.values(), YES_NO_PROMPT]
    probes = [engine_tokenizer.encode(render_probe(engine_tokenizer, prompt)) for prompt in prompts]
    kinds: set[str] = set()
    for _, sequence in judged:
        for branch in branches(sequence):
            ids = [sequence.ids[index] for index in branch]
            text = text_of(tokenizer, ids)
            assert engine_tokenizer.encode(text) == ids
            user = text.partition("<|user|>")[2].partition("<|end|>")[0]
            if user.startswith(("Do these two", "Which is")):
                prompt = EQUIVALENCE_PROMPT if user.startswith("Do") else SELECTION_PROMPT
                probe = engine_tokenizer.encode(render_probe(engine_tokenizer, replace(prompt, user=user)))
                assert probe == ids
                kinds.add(prompt.prefill + user[:2])
            else:
                assert any(ids[-len(probe) :] == probe for probe in probes)
    assert len(kinds) == 2


def test_a_selection_names_the_right_candidate_or_none(
    judged: list[tuple[Problem, TreeSequence]], tokenizer: PreTrainedTokenizerFast, maker: SequenceMaker
) -> None:
    names = {maker.answers[name]: name for name in (*SELECTION_NAMES, "none")}
    seen: set[str] = set()
    for problem, sequence in judged:
        oracle = Oracle(problem)
        for branch in branches(sequence):
            text = text_of(tokenizer, [sequence.ids[index] for index in branch])
            if "Which is the best" in text:
                lines = text.partition("\n")[2].partition("<|end|>")[0].split("\n")
                right = [line[0] for line in lines if oracle.judge(line[3:])]
                assert [names[sequence.verdicts[branch[-1]]]] == (right or ["none"]), text
                seen.add(names[sequence.verdicts[branch[-1]]])
    assert len(seen) > 2


def test_steps_proposed_by_the_draft_are_judged(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = train_problem(3)
    right = problem.steps[0].replace("Next,", "Now,")
    proposals = {3: [(0, right, True), (0, "Nonsense.", False)]}
    maker = SequenceMaker(tokenizer, "target", proposals)
    rng = random.Random(0)
    texts = [text_of(tokenizer, maker.make(problem, rng, judged=True, proposals=proposals[3]).ids) for _ in range(60)]
    assert any("Nonsense." in text for text in texts)


def test_a_token_sees_its_branch_and_the_trunk_before_it(judged: list[tuple[Problem, TreeSequence]]) -> None:
    sequences = [sequence for _, sequence in judged[:3]]
    batch = collate(sequences)
    for row, sequence in enumerate(sequences):
        visible = batch["mask"][row, 0] == 0.0
        for branch in branches(sequence):
            cut = sequence.cuts[branch[0]]
            assert visible[branch[-1]].nonzero().flatten().tolist() == [*range(cut), *branch]
        trunk = sequence.segments.index(1)
        assert visible[trunk - 1].nonzero().flatten().tolist() == list(range(trunk))
