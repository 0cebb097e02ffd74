"""Muon for the matrices inside, AdamW for the rest (arXiv 2502.16982): both with one learning-rate share in [0, 1]."""

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.012, 0.003
MOMENTUM, BETAS, EPSILON, DECAY = 0.95, (0.9, 0.98), 1e-9, 0.01
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix; x: [matrices, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = x.bfloat16() if x.is_cuda else x
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it: 2-D weights inside the network, not tables, patches or single rows."""
    inside = "embed" not in name and "conv1d" not in name and "patch_embed" not in name
    return parameter.ndim == 2 and inside and min(parameter.shape) >= 16


class Optimizer:
    """Steps all parameters of a model; moments are named for saving."""

    def __init__(self, model: nn.Module) -> None:
        self._groups: dict[torch.Size, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        self._others: list[tuple[str, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter):
                self._groups[parameter.shape].append((name, parameter))
            else:
                self._others.append((name, parameter))
        self._momentum = {
            shape: torch.stack([torch.zeros_like(p) for _, p in group]) for shape, group in self._groups.items()
        }
        self._first = [torch.zeros_like(p) for _, p in self._others]
        self._second = [torch.zeros_like(p) for _, p in self._others]
        self.num_steps = 0

    def moments(self) -> dict[str, Tensor]:
        named = {
            f"momentum.{name}": value
            for shape, group in self._groups.items()
            for (name, _), value in zip(group, self._momentum[shape], strict=True)
        }
        for (name, _), first, second in zip(self._others, self._first, self._second, strict=True):
            named[f"first.{name}"] = first
            named[f"second.{name}"] = second.sqrt()  # its root keeps more of its range in bf16
        return named

    def restore(self, moments: dict[str, Tensor], num_steps: int) -> None:
        for shape, group in self._groups.items():
            for (name, _), value in zip(group, self._momentum[shape], strict=True):
                value.copy_(moments[f"momentum.{name}"])
        for (name, _), first, second in zip(self._others, self._first, self._second, strict=True):
            first.copy_(moments[f"first.{name}"])
            second.copy_(moments[f"second.{name}"].float().square())
        self.num_steps = num_steps

    @torch.no_grad()
    def step(self, share: float) -> None:
        """One update with learning rates times `share`; gradients are used up."""
        self.num_steps += 1
        for shape, group in self._groups.items():
            gradients = torch.stack([p.grad for _, p in group])
            momentum = self._momentum[shape].lerp_(gradients, 1 - MOMENTUM)
            update = orthogonalised(gradients.lerp(momentum, MOMENTUM)).float()
            rate = MUON_RATE * share * math.sqrt(max(1.0, shape[0] / shape[1]))
            parameters = [p for _, p in group]
            torch._foreach_mul_(parameters, 1 - MUON_RATE * share * DECAY)
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-rate)
        self._adam(ADAM_RATE * share)

    def _adam(self, rate: float) -> None:
        parameters = [p for _, p in self._others]
        gradients = [p.grad for p in parameters]
        torch._foreach_lerp_(self._first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, gradients, gradients, 1 - BETAS[1])
        bias_first, bias_second = (1 - beta**self.num_steps for beta in BETAS)
        scale = torch._foreach_sqrt(self._second)
        torch._foreach_div_(scale, math.sqrt(bias_second))
        torch._foreach_add_(scale, EPSILON)
        torch._foreach_addcdiv_(parameters, self._first, scale, value=-rate / bias_first)
