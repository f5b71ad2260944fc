"""Muon for the matrices inside the layers, AdamW for the rest.

Muon orthogonalises the momentum of a matrix before it is applied, by a few Newton-Schulz steps (Jordan et al. 2024):
all directions of a matrix learn at one pace. Matrices of one shape, experts included, are orthogonalised as one batch.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that drives singular values towards one, as its authors chose them: fast, to within about 0.3."""


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """(..., rows, columns) → the nearest (semi-)orthogonal matrices, roughly."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon:
    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        self.groups = [(group, [torch.zeros_like(p) for p in group]) for group in by_shape.values()]

    @torch.no_grad()
    def step(self, share: float) -> None:
        lr = self.lr * share
        for parameters, momenta in self.groups:
            gradients = [parameter.grad for parameter in parameters]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_add(gradients, momenta, alpha=MOMENTUM)
            rows, columns = parameters[0].shape[-2:]
            updates = orthogonalize(torch.stack(ahead)) * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-lr)


class Optimizer:
    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.05) -> None:
        """`lr` is AdamW's; Muon's updates have unit scale and want ten times as much of the weight's."""
        inner = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2 and "embed" not in name]
        vectors = ("router", "shared_gate")
        matrices = [p for name, p in inner if not any(word in name for word in vectors)]
        chosen = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.muon = Muon(matrices, 8 * lr, weight_decay)
        fused = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.lr = lr
        self.parameters = list(model.parameters())

    def step(self, share: float) -> None:
        """`share` of the full learning rate."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.muon.step(share)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * share
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
