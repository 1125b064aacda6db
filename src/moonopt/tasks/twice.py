"""A backward pass that can be differentiated once more, in the weights of the losses.

With G(w) = sum_i w_i grad l_i, the derivative of <G(w), D> in w_i is <grad l_i, D>: one more pass over what the backward pass
has left, for any number of tasks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moonopt.linalg.polar import without_autocast
from moonopt.tasks.gradients import by_parameter, leaves_of, nodes_of, without_hooks


class WeightedGradients(NamedTuple):
    """G(w) without its values: its graph by leaf, which ``along`` frees."""

    weights: Tensor
    edges: dict[Tensor, GradientEdge]
    slopes: Tensor  # of what is compared, in each loss

    def along(self, directions: Mapping[Tensor, Tensor]) -> Tensor:
        """<grad l_i, directions> for every loss, times its slope: a second backward pass, without inner products."""
        here = [p for p in self.edges if p in directions]
        if not here:
            return torch.zeros_like(self.slopes)
        edges, along = [self.edges[p] for p in here], [directions[p] for p in here]
        with without_autocast(self.slopes.device.type):
            (derivative,) = torch.autograd.grad(edges, self.weights, along)
        return derivative * self.slopes


def backward(losses: Tensor, weights: Tensor, slopes: Tensor, parameters: Iterable[Tensor]) -> WeightedGradients:
    """What ``(weights * losses).sum().backward()`` does, to all leaves and with their hooks; and G(w) of ``parameters``."""
    weights = weights.detach().to(losses).requires_grad_()
    gradients = _gradients(losses, weights, leaves_of(losses))
    edges = _edges(losses, {p: gradients[p] for p in parameters if p in gradients})
    torch.autograd.backward(list(gradients), [gradient.detach() for gradient in gradients.values()])
    return WeightedGradients(weights, edges, slopes)


def differentiate(losses: Tensor, parameters: Sequence[Tensor]) -> WeightedGradients:
    """G(w) of losses as they are compared."""
    weights = torch.ones_like(losses, requires_grad=True)
    return WeightedGradients(weights, _edges(losses, _gradients(losses, weights, parameters)), torch.ones_like(losses))


def _gradients(losses: Tensor, weights: Tensor, leaves: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    if not leaves:
        return {}
    with torch.enable_grad(), without_hooks(leaves):
        combined = (weights * losses).sum()
        return by_parameter(leaves, torch.autograd.grad(combined, leaves, create_graph=True, allow_unused=True))


def _edges(losses: Tensor, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, GradientEdge]:
    """Where a function is marked as once differentiable, the graph ends: torch would go around it without a word."""
    has_functions = any(isinstance(node, BackwardCFunction) for node in nodes_of([losses]))
    if has_functions and any(type(node).__name__ == "Error" for node in nodes_of(gradients.values())):
        raise RuntimeError("The losses depend on a function that is marked with @once_differentiable.")
    return {p: get_gradient_edge(gradient) for p, gradient in gradients.items() if gradient.requires_grad}
