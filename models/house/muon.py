# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum whose matrices are made nearly orthogonal before each step.

After K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): the update
of a matrix is the polar factor of its Nesterov momentum, found by five steps of a quintic
Newton-Schulz iteration, times sqrt(max(1, rows / columns)). Matrices of one shape go together.
"""
import torch

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(g, steps=5):
    """g [n, rows, columns] -> matrices with the same singular vectors, singular values near 1."""
    a, b, c = _QUINTIC
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(parameters, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(self, group, shape, parameters):
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for parameter, update in zip(parameters, orthogonalise(torch.stack(updates))):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * scale)
