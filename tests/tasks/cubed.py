"""x ** 3 as functions that know some of its derivatives and no others."""

import torch
from torch.autograd.function import once_differentiable


class Cubed(torch.autograd.Function):
    """Without a derivative forwards."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class CubedOnceOnly(Cubed):
    """With its gradient and nothing more."""

    backward = staticmethod(once_differentiable(Cubed.backward))


class CubedForwardsOnly(CubedOnceOnly):
    """With a derivative forwards and without a second one backwards."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        return Cubed.forward(ctx, x)

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent
