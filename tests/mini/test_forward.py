"""The training forward pass matches the values and gradients of the model within bfloat16 precision."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evals.training.forward import forward_hidden


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
    """Return a mask for two rows: a trunk with two branches that do not see each other, and a row padded at its end."""
    visible = torch.tril(torch.ones(2, length, length, dtype=torch.bool))
    visible[0, 30:, 20:30] = False
    visible[1, :, length - 5 :] = torch.eye(length, dtype=torch.bool)[:, length - 5 :]
    return torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[:, None]


@pytest.mark.parametrize("length", [41, 64])
def test_values_and_gradients_match_the_model(model: LlamaForCausalLM, length: int) -> None:
    ids = torch.randint(64, (2, length))
    positions = torch.arange(length).repeat(2, 1)
    mask = tree_mask(length)
    result = model.model(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, output_attentions=True
    )
    expected, attentions = result.last_hidden_state, result.attentions
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    expected_gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    result = forward_hidden(model, ids, positions, mask, watched=[1], tapped=[1])
    hidden = result.hidden.float()
    (hidden * weights).sum().backward()
    assert list(result.scores) == [1]
    assert (model.model.norm.weight * result.tapped[1] - hidden).norm() < 0.02 * hidden.norm()
    assert (result.scores[1].softmax(-1) - attentions[1][:, 0]).abs().max() < 0.02
    assert (hidden - expected).norm() < 0.02 * expected.norm()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected_gradients[name]).norm() < 0.04 * expected_gradients[name].norm(), name
