"""What rounds of messages and their gradients are made of: products that are added up wider, ReLU, a GRU cell.

Each by torch, or on a GPU by a kernel of ``mpnn_kernels``, which needs triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moonopt.linalg.kernels.presence import has_kernels

#: Of how many numbers the rows of large tensors are a multiple, in float32 and in float16: they begin where products like it.
ALIGNED, HALF_ALIGNED = 4, 8
#: What the kernels hold whole: so many channels, and so many of anything else.
MOST_CHANNELS, MOST = 256, 64


def size_of(gradients: Tensor) -> Tensor:
    """The largest number of each gradient (..., B, N, width), by which it is divided while float16 might flush it to zero."""
    largest = torch.linalg.vector_norm(gradients, torch.inf, (-3, -2, -1), True)
    return torch.clamp(largest, min=torch.finfo(gradients.dtype).tiny)


def product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Added up and returned in a wider dtype: of stacks, or of two matrices."""
    if first.dtype == dtype:
        return first @ second
    if first.is_cuda:
        return (torch.mm if first.ndim == 2 else torch.bmm)(first, second, out_dtype=dtype)
    return first.to(dtype) @ second.to(dtype)


def positive_products(rows: Tensor, weights: Tensor) -> Tensor:
    """relu(rows weights'): the largest tensor of all is written once."""
    if _has_kernels(rows, weights.shape[1], channels=len(weights)):
        from moonopt.bench.models.mpnn_kernels import positive_products as kernel

        return kernel(rows, weights)
    return torch._addmm_activation(weights.new_zeros(len(weights)), rows, weights.T)


def where_positive(gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient of ReLU."""
    return torch.ops.aten.threshold_backward(gradient, value, 0)  # type: ignore[no-any-return]


def masked_sums(gradients: Tensor, hidden: Tensor, given: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_bij (hidden[b, i, j, c] > 0) gradients[b, i, k, j, c] given[b, i, j, f] as (K, C, F), in a wider dtype."""
    if _has_kernels(hidden, given.shape[3], channels=hidden.shape[3]):
        from moonopt.bench.models.mpnn_kernels import masked_sums as kernel

        return kernel(gradients, hidden, given).to(dtype)
    masked = where_positive(gradients, hidden.unsqueeze(2)).permute(2, 4, 0, 1, 3).flatten(2).flatten(0, 1)
    return product(masked, given.flatten(0, 2), dtype).view(gradients.shape[2], hidden.shape[3], -1)


def spread(hidden: Tensor, values: Tensor) -> Tensor:
    """sum_s hidden[b, s, a, c] values[b, s, m, :] as (B, N, M, C, width)."""
    if _has_kernels(hidden, hidden.shape[1], values.shape[3]):
        from moonopt.bench.models.mpnn_kernels import spread as kernel

        return kernel(hidden, values)
    return torch.einsum("bsac,bsmw->bamcw", hidden, values).contiguous()


def messages_backward(
    hidden: Tensor, given: Tensor, matrices: Tensor, count: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """What takes gradients (B, N, count, width) of what atoms get to those (B N, count, width) of what they have sent.

    Many on a GPU go through the edges' own matrices: made once and read for each round, these are fewer bytes than what atoms
    get of every channel, of QM9's network from nine gradients on (by count), and take at most twice the memory. They are in
    half precision: above 65,504 they are infinite, and so are the gradients.
    """
    atoms, channels, width = *hidden.shape[2:], len(matrices)
    if atoms * width <= 2 * count * channels and _has_kernels(hidden, atoms, width, count):
        from moonopt.bench.models.mpnn_kernels import edge_matrices, through_edges

        places, several = edge_matrices(hidden, given, matrices)
        return lambda of_got: through_edges(places, several, of_got).to(dtype)

    def by_channels(of_got: Tensor) -> Tensor:
        of_sent = spread(hidden, of_got).flatten(3).flatten(0, 2)
        return product(of_sent, matrices.mT, dtype).view(-1, count, width)

    return by_channels


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


def gru_backward_of_several(gradients: Tensor, gates: Tensor, out: Tensor) -> Tensor:
    """The same of gates (n, 5 width) for gradients (n, K, width): those of the gates, (n, K, 4 width), go to ``out``."""
    if gradients.dtype == torch.float32 and has_kernels(gradients.device):
        from moonopt.bench.models.mpnn_kernels import gru_backward_of_several as kernel

        return kernel(gradients, gates, out)
    of_gates, of_state = gru_backward(gradients, gates.unsqueeze(1))
    out.copy_(of_gates)
    return of_state


def _has_kernels(tensor: Tensor, *sides: int, channels: int = 0) -> bool:
    fits = channels <= MOST_CHANNELS and max(sides) <= MOST
    return fits and tensor.dtype == torch.float16 and has_kernels(tensor.device)
