"""Products of rows with a weight, by the library and in the layout that are fastest on this machine.

On a CPU in float32 PyTorch multiplies with MKL, which takes slower paths on processors from other makers than Intel.
Five rows times 192 x 1,024 numbers take 69 microseconds on an AMD EPYC; oneDNN takes 19 with the weight in its own
layout. In bfloat16 PyTorch calls oneDNN, which changes the layout of the weight again for every product: a pass of
Qwen2.5 1.5B over one row takes 298 ms, and 218 ms with weights in that layout. If a trial shows a clear gain, models
store their weights in it.

Weights may also be quantized: on a CPU as `Int8Matrix` and `Int4Matrix`, on a GPU as `Fp8Matrix`.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from stepspec.engines.torch_engine.threads import one_thread

Quantization = Literal["int8", "int4", "fp8"]
Layout = Literal["packed", "int8", "int4", "fp8"]
"""How a model stores its weights, if not plain; "packed" is oneDNN's own layout."""

DTYPES = torch.float32, torch.bfloat16
"""Data types that oneDNN has a layout of its own for."""

FEW_PRODUCTS = 300_000
"""Multiplications below which a call of oneDNN takes longer than PyTorch's own product, measured in float32."""

TRIAL_ROWS, MAX_SIDE = 5, 4096
"""Number of rows of the trial, as in a pass that verifies drafted tokens, and the longest side of its weight."""

GAIN = 1.3
"""Speedup that oneDNN must reach. It is well above 1 so that a machine always chooses the same library, because the two
round differently."""

LEAST_ROWS = 4
"""Rows of an int8 product. oneDNN multiplies fewer with slower kernels on processors from AMD."""

MOST_INT4_ROWS = 3
"""Rows up to which PyTorch's int4 product is faster than the int8 one; its time grows with every row."""

GROUP = 32
"""Neighboring inputs of a column that share a scale and an offset in int4."""

COLUMNS = 16
"""Columns that PyTorch's int4 product multiplies together."""

QUANTIZED_AT_ONCE = 1 << 24
"""Weights that are quantized together, in float32."""

SMALLEST = torch.tensor(1e-30)
"""Least scale, for rows and columns of zeros."""

ZERO_POINT = 128
"""What stands for 0 in uint8."""

FP8, LARGEST_FP8 = torch.float8_e4m3fn, 448.0
"""The data type of `Fp8Matrix`, and its largest number."""

SIDE_FP8 = 16
"""Both sides of an fp8 product are multiples of this number."""


class Matrix(Protocol):
    """A weight [in, out] with an optional bias [out].

    Attributes:
        num_bytes: bytes of the weight that a product of one row reads.
        stored_bytes: bytes that it takes besides the weight that it was made from.
        holds_plain: whether it uses the weight that it was made from, which must then stay in memory.
    """

    num_bytes: int
    stored_bytes: int
    holds_plain: bool

    def product(self, x: Tensor) -> Tensor:
        """Return the product of rows [N, in], [N, out]."""
        ...

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """Add the product of rows [N, in] to `total` [N, out], in place. It may overwrite the rows."""
        ...


class PlainMatrix:
    """A weight in PyTorch's own layout."""

    holds_plain, stored_bytes = True, 0

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        """See `Matrix.product`."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """See `Matrix.add_product`."""
        total.addmm_(x, self.weight)
        if self.bias is not None:
            total += self.bias


class PackedMatrix:
    """A weight in oneDNN's own layout. Small weights are stored plain too, for products of a single row."""

    def __init__(self, plain: PlainMatrix) -> None:
        self.num_bytes = self.stored_bytes = plain.num_bytes
        self._size = plain.weight.numel()
        self.holds_plain = self._size < FEW_PRODUCTS
        self._small = plain if self.holds_plain else None
        self._packed, self._bias = _packed(plain.weight), plain.bias

    def product(self, x: Tensor) -> Tensor:
        """See `Matrix.product`."""
        if self._small is not None and len(x) * self._size < FEW_PRODUCTS:
            return self._small.product(x)
        return _packed_product(x, self._packed, self._bias)

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """See `Matrix.add_product`."""
        if self._small is not None and len(x) * self._size < FEW_PRODUCTS:
            self._small.add_product(total, x)
        else:
            total += _packed_product(x, self._packed, self._bias)


class Int8Matrix:
    """A weight in int8, multiplied by oneDNN with rows in uint8, in whole numbers.

    Every column of the weight has a scale, and so has every row: a row's product does not depend on the other rows.
    Rows and products are in float32.
    """

    holds_plain = False

    def __init__(self, plain: PlainMatrix) -> None:
        columns = plain.weight.T  # [out, in]
        self._codes = torch.empty(columns.shape, dtype=torch.int8)
        self._scales = torch.empty(len(columns))
        count = max(1, QUANTIZED_AT_ONCE // columns.shape[1])
        parts = (each.split(count) for each in (columns, self._codes, self._scales))
        for part, codes, scales in zip(*parts, strict=True):
            numbers = part.float()
            scales.copy_(_scales(numbers)[:, 0])
            codes.copy_((numbers / scales[:, None]).round_())
        self._bias = None if plain.bias is None else plain.bias.float()
        self._zeros = torch.zeros(len(columns), dtype=torch.int32)
        self.num_bytes = self.stored_bytes = self._codes.nbytes
        self._codes = _onednn().qlinear_prepack(self._codes, None)

    def product(self, x: Tensor) -> Tensor:
        """See `Matrix.product`."""
        product, scales = self._whole_product(x, torch.empty_like(x))
        product.mul_(scales)
        return product if self._bias is None else product.add_(self._bias)

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """See `Matrix.add_product`."""
        product, scales = self._whole_product(x, x)
        total.addcmul_(product, scales)
        if self._bias is not None:
            total += self._bias

    def _whole_product(self, x: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product of rows in whole numbers times the columns' scales, [N, out], and the rows' scales.

        `scratch` has the shape of the rows, and may be the rows: for wide passes, new memory costs much of the time.
        """
        scales = _scales(x)
        # Adding half and dropping what is behind the point rounds to the nearest whole number.
        rows = torch.mul(x, scales.reciprocal(), out=scratch).add_(ZERO_POINT + 0.5).to(torch.uint8)
        if 0 < len(x) < LEAST_ROWS:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, LEAST_ROWS - len(x)))
        product = _onednn().qlinear_pointwise(
            rows, 1.0, ZERO_POINT, self._codes, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product[: len(x)], scales


class Int4Matrix:
    """A weight in int4, multiplied by PyTorch with up to three rows in bfloat16. More rows take `Int8Matrix`.

    The two products round differently, so a row's product depends on the number of rows. This is for drafts, whose
    tokens are verified.
    """

    holds_plain = False

    def __init__(self, plain: PlainMatrix) -> None:
        self._wide = Int8Matrix(plain)
        weight = plain.weight.T  # [out, in]
        codes = torch.empty(weight.shape, dtype=torch.int32)
        self._scales = torch.empty(weight.shape[1] // GROUP, len(weight), 2, dtype=torch.bfloat16)
        count = max(1, QUANTIZED_AT_ONCE // weight.shape[1])
        parts = weight.split(count), codes.split(count), self._scales.split(count, 1)
        for part, whole, scales in zip(*parts, strict=True):
            groups = part.float().unflatten(1, (-1, GROUP))
            lowest, highest = groups.aminmax(dim=2)
            scales[..., 0] = ((highest - lowest) / 15 + SMALLEST).T
            # A code c stands for (c - 8) * scale + offset. Both are rounded to bfloat16 before the codes are chosen.
            scales[..., 1] = lowest.T + 8 * scales[..., 0].float()
            scale, offset = scales.float().transpose(0, 1).unbind(2)  # [out, groups] each
            whole.copy_(((groups - offset[..., None]) / scale[..., None] + 8).round_().clamp_(0, 15).flatten(1))
        self._codes = _aten()._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._bias = None if plain.bias is None else plain.bias.float()
        self.num_bytes = self._codes.nbytes + self._scales.nbytes
        self.stored_bytes = self.num_bytes + self._wide.stored_bytes

    def product(self, x: Tensor) -> Tensor:
        """See `Matrix.product`."""
        if len(x) > MOST_INT4_ROWS:
            return self._wide.product(x)
        product = _aten()._weight_int4pack_mm_for_cpu(x.bfloat16(), self._codes, GROUP, self._scales)
        return product.float() if self._bias is None else product + self._bias

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """See `Matrix.add_product`."""
        total += self.product(x)


class Fp8Matrix:
    """A weight in 8-bit floating point, multiplied with rows in the same type. Every column and every row has a scale.

    Rows and products are in the data type of the weight that it was made from.
    """

    holds_plain = False

    def __init__(self, plain: PlainMatrix) -> None:
        columns, device = plain.weight.T, plain.weight.device  # [out, in]
        self._least = SMALLEST.to(device)
        self._codes = torch.empty(columns.shape, dtype=FP8, device=device)
        self._scales = torch.empty(len(columns), 1, device=device)
        count = max(1, QUANTIZED_AT_ONCE // columns.shape[1])
        parts = (each.split(count) for each in (columns, self._codes, self._scales))
        for part, codes, scales in zip(*parts, strict=True):
            found, own = self._quantized(part)
            codes.copy_(found)
            scales.copy_(own)
        self._bias = plain.bias
        self.num_bytes = self.stored_bytes = self._codes.nbytes

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [N, in] in fp8, and their scales [N, 1]."""
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
        scales = torch.add(self._least, largest, alpha=1 / LARGEST_FP8)
        return (rows / scales).to(FP8), scales

    def product(self, x: Tensor) -> Tensor:
        """See `Matrix.product`."""
        codes, scales = self._quantized(x)
        scaled_mm: Any = vars(torch)["_scaled_mm"]
        return scaled_mm(codes, self._codes.T, scales, self._scales.T, self._bias, out_dtype=x.dtype)

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """See `Matrix.add_product`."""
        total += self.product(x)


def stored_as(layout: Layout, matrix: Matrix) -> Matrix:
    """Return a plain matrix in another layout; in int8 or plain if its sides are no multiples of what that needs."""
    assert isinstance(matrix, PlainMatrix)
    if layout == "packed":
        return PackedMatrix(matrix)
    inputs, columns = matrix.weight.shape
    if layout == "fp8":
        return matrix if inputs % SIDE_FP8 or columns % SIDE_FP8 else Fp8Matrix(matrix)
    return Int8Matrix(matrix) if layout == "int8" or inputs % GROUP or columns % COLUMNS else Int4Matrix(matrix)


def _scales(x: Tensor) -> Tensor:
    """Return the scale of each row [N, in] in 8 bits, [N, 1]."""
    largest = torch.maximum(x.amax(1, keepdim=True), -x.amin(1, keepdim=True))
    return torch.add(SMALLEST, largest, alpha=1 / 127)


def can_quantize(device: torch.device, quantize: Quantization = "int8") -> bool:
    """Return whether products of quantized weights run on a device.

    Those in int8 and int4 need a CPU with VNNI instructions, because older ones add in 16 bits, which overflow. Those
    in fp8 need a GPU, and a PyTorch that multiplies with scales of rows on it.
    """
    if quantize == "fp8":
        return device.type == "cuda" and _multiplies_fp8(device)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


@lru_cache
def _multiplies_fp8(device: torch.device) -> bool:
    rows = torch.ones(SIDE_FP8, SIDE_FP8, dtype=torch.bfloat16, device=device)
    try:
        Fp8Matrix(PlainMatrix(rows)).product(rows)
    except RuntimeError:
        return False
    return True


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this PyTorch multiplies with weights in oneDNN's layout, in a data type of `DTYPES`."""
    operations: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return False
    is_supported = getattr(operations, "_is_mkldnn_bf16_supported", None)
    return dtype == torch.float32 or (is_supported is not None and is_supported())


def packing_pays(weight: Tensor) -> bool:
    """Return whether to store weights like this one in oneDNN's layout."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    columns, inputs = (min(side, MAX_SIDE) for side in weight.shape)
    return _onednn_is_faster(inputs, columns, weight.dtype)


@lru_cache
@torch.inference_mode()
def _onednn_is_faster(inputs: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies a few rows with a weight [inputs, columns] faster, by a trial on one thread."""
    if not can_pack(dtype):
        return False
    with one_thread():
        rows, weight = torch.ones(TRIAL_ROWS, inputs, dtype=dtype), torch.ones(inputs, columns, dtype=dtype)
        packed = _packed(weight)
        return _seconds(lambda: torch.mm(rows, weight)) > GAIN * _seconds(lambda: _packed_product(rows, packed, None))


def _packed(weight: Tensor) -> Tensor:
    """Return a weight [in, out] in oneDNN's layout. The layout may depend on the number of rows; 16 is a guess."""
    operations: Any = torch.ops.mkldnn
    return operations._reorder_linear_weight(weight.T, 16)


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    operations: Any = torch.ops.mkldnn
    return operations._linear_pointwise(x, packed, bias, "none", [], "")


def _onednn() -> Any:
    """Return oneDNN's products of quantized weights."""
    return torch.ops.onednn


def _aten() -> Any:
    """Return PyTorch's own operations, for those that its Python modules do not export."""
    return torch.ops.aten


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of 20 runs, in seconds."""
    times: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
