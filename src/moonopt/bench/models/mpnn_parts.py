"""What rounds of messages and their gradients are made of: products that are added up wider, ReLU, a GRU cell."""

import torch
from torch import Tensor


def product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Added up and returned in a wider dtype: of stacks, or of two matrices."""
    if first.dtype == dtype:
        return first @ second
    if first.is_cuda:
        return (torch.mm if first.ndim == 2 else torch.bmm)(first, second, out_dtype=dtype)
    return first.to(dtype) @ second.to(dtype)


def where_positive(gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient of ReLU."""
    return torch.ops.aten.threshold_backward(gradient, value, 0)  # type: ignore[no-any-return]


def gru(inputs: Tensor, states: Tensor, x: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a GRU cell, and side by side what its gradient needs: gates r, z, n, the state before, its part of n."""
    if inputs.is_cuda:
        return torch.ops.aten._thnn_fused_gru_cell(inputs, states, x, bias_ih, bias_hh)  # type: ignore[no-any-return]
    (r_in, z_in, n_in), (r_x, z_x, n_x) = (inputs + bias_ih).chunk(3, 1), (states + bias_hh).chunk(3, 1)
    r, z = (r_in + r_x).sigmoid(), (z_in + z_x).sigmoid()
    n = (n_in + r * n_x).tanh()
    return n + z * (x - n), torch.cat([r, z, n, x, n_x], 1)


def gru_backward(gradient: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Side by side what goes to r, z, n and the state's part of n, and what goes to the state itself."""
    r, z, n, x, n_x = gates.chunk(5, -1)
    of_n = gradient * (1 - z) * (1 - n * n)
    of_gates = of_n * n_x * r * (1 - r), gradient * (x - n) * z * (1 - z), of_n, of_n * r
    return torch.cat(of_gates, -1), gradient * z
