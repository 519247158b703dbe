"""Text from speculative sampling has the target's joint distribution, and the tests would detect a bias."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet
from distributions import FALSE_ALARM, conditional_distributions, joint_distribution, p_value, sample_texts
from tiny_models import attend_slowly, llama_config, make_model, make_network, noisy_copy
from torch import Tensor
from transformers import PreTrainedModel

from stepspec.engines.protocol import Sampling
from stepspec.engines.torch_engine.drafters import Drafter
from stepspec.engines.torch_engine.drafters.draft_model import DraftModel
from stepspec.engines.torch_engine.drafters.lookup import PromptLookup
from stepspec.engines.torch_engine.drafters.suffix import Suffix
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.pace import Pacer, Round
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import acceptance, residual

PROMPT = [1, 4, 2, 1, 1, 4, 2]  # repeats itself, so that lookup drafters find likely drafts
NUM_TEXTS = 2000
DRAFTERS = ["draft-model", "prompt-lookup", "suffix"]
SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7, top_p=0.85),
    Sampling(1.2, top_k=3),
    Sampling(1.0, min_p=0.5),
    Sampling(1.0, logit_bias=((1, 0.7), (3, -0.4)), allowed=frozenset({0, 1, 3, 4})),
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    # Small weights make most of the 125 texts likely enough to be counted separately.
    shape = {"vocab_size": 5, "num_hidden_layers": 2, "initializer_range": 0.1}
    return make_network(llama_config(**shape), seed=3)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target, share=0.4)


def make_drafter(name: str, model: CausalModel, draft: PreTrainedModel) -> Drafter:
    """A drafter whose guesses are neither always right nor always wrong."""
    if name == "draft-model":
        return DraftModel(make_model(draft), model.vocab_size, 500)
    return PromptLookup(model.device) if name == "prompt-lookup" else Suffix(model.device)


def sampled_by_drafters() -> list[ParameterSet]:
    """Return each drafter with each way to sample. `make test` runs all ways with one drafter, and all drafters with
    one way."""
    quick = {*product(["draft-model"], SAMPLINGS), *product(DRAFTERS, SAMPLINGS[:1])}
    return [
        pytest.param(*each, id=f"{each[0]}-{each[1]}", marks=[] if each in quick else [pytest.mark.soak])
        for each in product(DRAFTERS, SAMPLINGS)
    ]


@pytest.mark.parametrize("num_texts", [NUM_TEXTS, pytest.param(6000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("name", "sampling"), sampled_by_drafters())
def test_tokens_from_speculation_have_the_targets_joint_distribution(
    target: PreTrainedModel, draft: PreTrainedModel, name: str, sampling: Sampling, num_texts: int
) -> None:
    """A correct sampler fails for one in a million choices of the seeds (chi-square, `FALSE_ALARM`)."""
    model = make_model(target)
    texts, accepted = sample_texts(model, make_drafter(name, model, draft), PROMPT, sampling, num_texts, depth=3)
    assert 0.1 < accepted < 0.98, "the test needs both accepted and rejected tokens"
    assert p_value(texts, joint_distribution(conditional_distributions(target, PROMPT, 3, sampling))) > FALSE_ALARM


class Turns(Pacer):
    """Looks tokens up where the text has an odd length, and drafts them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: Counter[bool] = Counter()
        """Rounds with drafted tokens, by whether they were looked up."""

    def count(self, rows: Sequence[BatchRow], load: int) -> int:
        return 2

    def num_looked_up(self, rows: Sequence[BatchRow], counts: Sequence[int], load: int) -> int:
        return 2 * (rows[0].length % 2)

    def worth_verifying(self, rows: Sequence[BatchRow], counts: Sequence[int], load: int) -> int:
        return max(counts)

    def note(self, rows: Sequence[BatchRow], load: int, done: Round) -> None:
        self.rounds[done.looked_up] += any(done.drafted)


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
def test_looked_up_and_drafted_tokens_in_turn_have_the_targets_joint_distribution(
    target: PreTrainedModel, draft: PreTrainedModel, sampling: Sampling
) -> None:
    model, pacer = make_model(target), Turns()
    drafter = DraftModel(make_model(draft), model.vocab_size, 4)
    texts, accepted = sample_texts(model, drafter, PROMPT, sampling, NUM_TEXTS, batch=2, pacer=pacer)
    assert 0.1 < accepted < 0.98
    assert min(pacer.rounds[True], pacer.rounds[False]) > NUM_TEXTS / 20
    assert p_value(texts, joint_distribution(conditional_distributions(target, PROMPT, 3, sampling))) > FALSE_ALARM


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_the_passes_of_a_gpu_have_the_targets_joint_distribution(
    target: PreTrainedModel, draft: PreTrainedModel, sampling: Sampling
) -> None:
    model, drafter = make_model(target), make_model(draft)
    for each in (model, drafter):
        each.attend_in_slots_by(attend_slowly)
    texts, accepted = sample_texts(model, DraftModel(drafter, model.vocab_size, 500), PROMPT, sampling, NUM_TEXTS)
    assert 0.1 < accepted < 0.98
    assert p_value(texts, joint_distribution(conditional_distributions(target, PROMPT, 3, sampling))) > FALSE_ALARM


def test_three_tokens_from_the_target_alone_have_its_joint_distribution(target: PreTrainedModel) -> None:
    """A correct sampler fails for one in a million choices of the seeds (chi-square, `FALSE_ALARM`)."""
    texts, _ = sample_texts(make_model(target), None, PROMPT, Sampling(1.0), NUM_TEXTS)
    assert p_value(texts, joint_distribution(conditional_distributions(target, PROMPT, 3, Sampling(1.0)))) > FALSE_ALARM


def speculate(p: list[Tensor], q: list[Tensor], believed_q: list[Tensor], num_rows: int) -> Tensor:
    """Return texts [N, depth] by the rule alone: tokens are sampled from `q` and accepted as if from `believed_q`."""
    generator = torch.Generator().manual_seed(0)
    text: list[Tensor] = []
    for p_here, q_here, believed in zip(p, q, believed_q, strict=True):
        before = tuple(text)
        p_rows, q_rows, believed_rows = (
            distributions[before].expand(num_rows, -1) for distributions in (p_here, q_here, believed)
        )  # [N, V]
        drafted = q_rows.multinomial(1, generator=generator)
        chance = acceptance(p_rows, believed_rows).gather(1, drafted)
        accepted = torch.rand(num_rows, 1, generator=generator) < chance
        replacement = residual(p_rows, believed_rows).multinomial(1, generator=generator)
        text.append(torch.where(accepted, drafted, replacement)[:, 0])
    return torch.stack(text, dim=1)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_same_statistic_detects_a_wrong_draft_distribution(
    target: PreTrainedModel, draft: PreTrainedModel, sampling: Sampling
) -> None:
    """With the same number of texts the right draft distribution passes, and another model's distribution fails."""
    p, q = conditional_distributions(target, PROMPT, 3, sampling), conditional_distributions(draft, PROMPT, 3, sampling)
    other = conditional_distributions(noisy_copy(target, share=0.4, seed=2), PROMPT, 3, sampling)
    assert p_value(speculate(p, q, q, NUM_TEXTS), joint_distribution(p)) > FALSE_ALARM
    assert p_value(speculate(p, q, other, NUM_TEXTS), joint_distribution(p)) < FALSE_ALARM


def test_the_same_statistic_detects_text_of_the_draft(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    texts, _ = sample_texts(make_model(draft), None, PROMPT, Sampling(1.0), NUM_TEXTS)
    assert p_value(texts, joint_distribution(conditional_distributions(target, PROMPT, 3, Sampling(1.0)))) < FALSE_ALARM
