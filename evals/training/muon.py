"""Muon (https://kellerjordan.github.io/posts/muon/) with products in the fastest type of the CPU.

`torch.optim.Muon` computes in bfloat16, which takes several times as long as float32 on a CPU without AVX-512.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evals.training.forward import COMPUTE_DTYPE

STEPS = 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of the Newton-Schulz iteration, from Muon's author."""


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrix, up to singular values between about 0.7 and 1.2, [m, n]."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.t()).t()
    a, b, c = COEFFICIENTS
    x = matrix.to(COMPUTE_DTYPE)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Gradient descent with Nesterov momentum on matrices, with orthogonalized updates.

    Args:
        matrices: the trained parameters, with two dimensions each.
        lr: the learning rate. A matrix with more rows than columns takes a larger step, as in `torch.optim.Muon`.
        momentum: share of the average of gradients that is kept at each step.
        weight_decay: share of a weight that is removed at each step, times the learning rate.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "average" not in state:
                    state["average"] = torch.zeros_like(matrix)
                average = state["average"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonalized(matrix.grad.lerp(average, momentum))
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
        return loss
