"""The training forward agrees with the model's own, values and gradients, as closely as bfloat16 does."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stepspec.mini.forward import forward_hidden


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.set_attn_implementation("eager")
    return model


def tree_mask(length: int) -> torch.Tensor:
    """Two branches of a trunk, which do not see each other; a row that is padded at its end."""
    visible = torch.tril(torch.ones(2, length, length, dtype=torch.bool))
    visible[0, 30:, 20:30] = False
    visible[1, :, length - 5 :] = torch.eye(length, dtype=torch.bool)[:, length - 5 :]
    return torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[:, None]


@pytest.mark.parametrize("length", [41, 64])
def test_values_and_gradients_are_those_of_the_model(model: LlamaForCausalLM, length: int) -> None:
    ids = torch.randint(64, (2, length))
    positions = torch.arange(length).repeat(2, 1)
    mask = tree_mask(length)
    read = model.model(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, output_attentions=True
    )
    wanted, distributions = read.last_hidden_state, read.attentions
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    wanted_gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    read = forward_hidden(model, ids, positions, mask, watched=[1], tapped=[1])
    hidden = read.hidden.float()
    (hidden * weights).sum().backward()
    assert list(read.scores) == [1]
    assert (model.model.norm.weight * read.tapped[1] - hidden).norm() < 0.02 * hidden.norm()
    assert (read.scores[1].softmax(-1) - distributions[1][:, 0]).abs().max() < 0.02
    assert (hidden - wanted).norm() < 0.02 * wanted.norm()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - wanted_gradients[name]).norm() < 0.04 * wanted_gradients[name].norm(), name
