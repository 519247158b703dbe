"""All layouts of a weight give the products of the weight that they store, and rows do not affect each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.bench.hooks import plain_weight
from stepspec.engines.torch_engine import matrix
from stepspec.engines.torch_engine.matrix import (
    DTYPES,
    FEW_PRODUCTS,
    MOST_INT4_ROWS,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    PackedMatrix,
    PlainMatrix,
    Quantization,
    can_pack,
    can_quantize,
    packing_pays,
    stored_as,
)

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch has no oneDNN")
quantizes = pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="this CPU has no VNNI instructions")


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
        plain = PlainMatrix(weight.T, bias_of_both if bias else None)
        layouts = [plain, PackedMatrix(plain)]
        assert torch.equal(plain_weight(layouts[1]), weight.T)
        assert torch.allclose(*(each.product(x) for each in layouts), rtol=rtol, atol=atol)
        sums = [total.clone(), total.clone()]
        for each, own_sum in zip(layouts, sums, strict=True):
            each.add_product(own_sum, x)
        assert torch.allclose(*sums, rtol=rtol, atol=atol)


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_products_are_those_of_rows_and_weights_in_three_bits(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x, total = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((48, 96), (48,), (7, 96), (7, 48))
    )
    x[3] *= 1000  # neither a row nor a column takes the others' precision
    weight[5] /= 1000
    x[6] = 0
    made = Fp8Matrix(PlainMatrix(weight.T, bias if has_bias else None))
    found, expected = made.product(x), PlainMatrix(weight.T, bias if has_bias else None).product(x)
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        error, size = (found - expected)[part].float().norm(), expected[part].float().norm()
        assert error < 0.05 * size
    assert (found - expected)[:3, 5].abs().max() < 0.2 * expected[:3, 5].abs().max()
    summed = total.clone()
    made.add_product(summed, x)
    assert torch.allclose(summed, total + found, rtol=2**-7, atol=2**-2)
    assert isinstance(stored_as("fp8", PlainMatrix(weight[:, :90].T)), PlainMatrix), "its side is no multiple of 16"


def test_small_products_use_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_sizes: list[int] = []

    def product(x: torch.Tensor, *_: object) -> torch.Tensor:
        packed_sizes.append(len(x))
        return x.new_zeros(len(x), 1000)

    monkeypatch.setattr(matrix, "_packed_product", product)
    weight = PackedMatrix(PlainMatrix(torch.zeros(100, 1000)))
    assert weight.holds_plain
    assert not PackedMatrix(PlainMatrix(torch.zeros(1000, 1000))).holds_plain
    enough = FEW_PRODUCTS // 100_000
    for rows in (1, enough - 1, enough, enough + 1):
        weight.product(torch.zeros(rows, 100))
    assert packed_sizes == [enough, enough + 1]


@pytest.mark.parametrize("pays", [True, False])
def test_only_weights_in_float32_or_bfloat16_are_packed(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_onednn_is_faster", lambda *_: pays)
    for dtype in DTYPES:
        assert packing_pays(torch.zeros(3, 2, dtype=dtype)) is pays
    assert not packing_pays(torch.zeros(3, 2, dtype=torch.float16))


def test_a_trial_with_a_weight_of_that_shape_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def packed(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(weight.shape)
        return torch.ones(1)

    monkeypatch.setattr(matrix, "_packed", packed)
    monkeypatch.setattr(matrix, "_seconds", lambda _: 1.0)
    matrix._onednn_is_faster.cache_clear()
    assert not any(packing_pays(torch.zeros(10_000, 24)) for _ in range(2))
    assert shapes == [(24, matrix.MAX_SIDE)]
    matrix._onednn_is_faster.cache_clear()


def example(rows: int, width: int, out: int, seed: int = 0) -> tuple[PlainMatrix, torch.Tensor]:
    """Return a weight with a bias, and rows of different sizes, one of them 0."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((out, width), (out,), (rows, width)))
    return PlainMatrix(weight.T, bias), x * torch.arange(rows)[:, None]


@quantizes
@settings(max_examples=30)
@given(
    rows=st.integers(0, 70),
    width=st.sampled_from([32, 96, 192, 1000]),
    out=st.sampled_from([48, 320, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_int8_product_is_that_of_the_stored_weight_and_the_rounded_rows(
    rows: int, width: int, out: int, dtype: torch.dtype
) -> None:
    plain, x = example(rows, width, out)
    with torch.inference_mode():
        assert plain.bias is not None
        matrix = Int8Matrix(PlainMatrix(plain.weight.to(dtype), plain.bias))
        weight, total = plain_weight(matrix), torch.ones(rows, out)
        assert (weight - plain.weight.to(dtype)).abs().amax(0).le(plain.weight.abs().amax(0) / 250).all()
        scales = x.abs().amax(1, keepdim=True).clamp(min=1e-20) / 127
        exact = ((x / scales).round() * scales).double() @ weight.double() + plain.bias
        step = (scales * weight.abs().amax(0)).double()  # one element may be rounded the other way, at a half
        assert ((matrix.product(x) - exact).abs() <= step + 1e-4).all()
        matrix.add_product(total, x.clone())
        assert torch.allclose(total, 1 + matrix.product(x), atol=1e-4)


@quantizes
@pytest.mark.parametrize("rows", [1, MOST_INT4_ROWS])
def test_an_int4_product_of_few_rows_is_that_of_the_stored_weight(rows: int) -> None:
    plain, x = example(rows, 96, 48)
    matrix = stored_as("int4", plain)
    assert isinstance(matrix, Int4Matrix)
    assert plain.bias is not None
    steps = plain.weight.T.unflatten(1, (3, 32)).aminmax(dim=2)
    step = ((steps.max - steps.min) / 15).repeat_interleave(32, 1).T  # the scales and the codes are rounded
    assert ((plain_weight(matrix) - plain.weight).abs() <= 0.6 * step + 0.02).all()
    exact = x.bfloat16().float() @ plain_weight(matrix).float() + plain.bias
    assert torch.allclose(matrix.product(x), exact, rtol=0.02, atol=0.02 * float(x.abs().max() + 1))
    total = torch.ones(rows, 48)
    matrix.add_product(total, x)
    assert torch.equal(total, 1 + matrix.product(x))


@quantizes
def test_more_rows_of_an_int4_weight_and_odd_sides_take_the_int8_product() -> None:
    plain, x = example(MOST_INT4_ROWS + 1, 96, 48)
    assert torch.equal(stored_as("int4", plain).product(x), Int8Matrix(plain).product(x))
    for width, out in ((90, 48), (96, 50)):
        assert isinstance(stored_as("int4", example(1, width, out)[0]), Int8Matrix)


@quantizes
@settings(max_examples=20)
@given(rows=st.integers(1, 70), layout=st.sampled_from(["int8", "int4"]), seed=st.integers(0, 5))
def test_a_row_of_a_quantized_product_does_not_depend_on_the_others(rows: int, layout: Quantization, seed: int) -> None:
    plain, x = example(71, 192, 320, seed)
    x[70] = 1e6  # a large neighbor
    matrix = stored_as(layout, plain)
    narrow = layout == "int4" and rows <= MOST_INT4_ROWS
    others = matrix.product(x[-MOST_INT4_ROWS:] if narrow else x)
    assert torch.equal(matrix.product(x[-rows:]), others[-rows:])
