"""Both layouts of a weight give the same products, and the choice between them depends only on the size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepspec.engines.torch_engine import matrix
from stepspec.engines.torch_engine.matrix import FEW_PRODUCTS, MAX_PACKED, Matrix, packing_pays

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 70),
    width=st.sampled_from([32, 96, 192]),
    out=st.sampled_from([48, 320, 1024]),
    bias=st.booleans(),
)
def test_both_layouts_give_the_same_product(rows: int, width: int, out: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out, width, generator=generator).T
    bias_of_both = torch.randn(out, generator=generator) if bias else None
    x, total = torch.randn(rows, width, generator=generator), torch.randn(rows, out, generator=generator)
    with torch.inference_mode():
        plain, packed = (Matrix(weight, bias_of_both, packed=packed) for packed in (False, True))
        assert torch.allclose(plain.product(x), packed.product(x), atol=1e-4)
        sums = [total.clone(), total.clone()]
        for each, own_sum in zip((plain, packed), sums, strict=True):
            each.add_product(own_sum, x)
        assert torch.allclose(*sums, atol=1e-4)


def test_small_products_use_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_sizes: list[int] = []

    def product(x: torch.Tensor, *_: object) -> torch.Tensor:
        packed_sizes.append(len(x))
        return x.new_zeros(len(x), 1000)

    monkeypatch.setattr(matrix, "_packed_product", product)
    weight = Matrix(torch.zeros(100, 1000), packed=True)
    enough = FEW_PRODUCTS // 100_000
    for rows in (1, enough - 1, enough, enough + 1):
        weight.product(torch.zeros(rows, 100))
    assert packed_sizes == [enough, enough + 1]


@pytest.mark.parametrize("pays", [True, False])
def test_only_models_of_a_limited_size_in_float32_store_weights_twice(
    pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "_onednn_is_faster", lambda *_: pays)
    assert packing_pays(torch.zeros(3, 2), MAX_PACKED) is pays
    assert not packing_pays(torch.zeros(3, 2, dtype=torch.float16), MAX_PACKED)
    assert not packing_pays(torch.zeros(3, 2), MAX_PACKED + 1)


def test_a_trial_with_a_weight_of_that_shape_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def packed(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(weight.shape)
        return torch.ones(1)

    monkeypatch.setattr(matrix, "_packed", packed)
    monkeypatch.setattr(matrix, "_seconds", lambda _: 1.0)
    matrix._onednn_is_faster.cache_clear()
    assert not any(packing_pays(torch.zeros(10_000, 24), 1000) for _ in range(2))
    assert shapes == [(24, matrix.MAX_SIDE)]
    matrix._onednn_is_faster.cache_clear()
