"""Both layouts of a weight give the same products, and the choice between them depends only on the size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepspec.engines.torch_engine import matrix
from stepspec.engines.torch_engine.matrix import DTYPES, FEW_PRODUCTS, MAX_PACKED, Matrix, can_pack, packing_pays

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch has no oneDNN")


@settings(max_examples=30)
@given(
    rows=st.integers(1, 70),
    width=st.sampled_from([32, 96, 192]),
    out=st.sampled_from([48, 320, 1024]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, *(each for each in DTYPES[1:] if can_pack(each))]),
)
def test_both_layouts_give_the_same_product(rows: int, width: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes = (out, width), (out,), (rows, width), (rows, out)
    weight, bias_of_both, x, total = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    # In bfloat16 values up to 60 are rounded to 8 bits, once for the product and once for a sum.
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (2**-7, 2**-2)
    with torch.inference_mode():
        layouts = [Matrix(weight.T, bias_of_both if bias else None, packed=packed) for packed in (False, True)]
        assert torch.allclose(*(each.product(x) for each in layouts), rtol=rtol, atol=atol)
        sums = [total.clone(), total.clone()]
        for each, own_sum in zip(layouts, sums, strict=True):
            each.add_product(own_sum, x)
        assert torch.allclose(*sums, rtol=rtol, atol=atol)


def test_small_products_use_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_only_models_of_a_limited_size_in_float32_or_bfloat16_store_weights_twice(
    pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "_onednn_is_faster", lambda *_: pays)
    for dtype in DTYPES:
        assert packing_pays(torch.zeros(3, 2, dtype=dtype), MAX_PACKED) is pays
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
