"""What rounds of messages and their gradients are made of: products that are added up wider, ReLU, a GRU cell.

Each by torch, or on a GPU by a kernel of ``mpnn_kernels``, which needs triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moonopt.linalg.kernels.presence import has_kernels

#: Of how many channels the kernels hold all at once.
MOST_CHANNELS = 256
#: From so many gradients on the edges' own matrices, read for each round, are fewer bytes than what atoms get of every channel,
#: by count, for three rounds of QM9's network.
MANY = 8


def product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Added up and returned in a wider dtype: of stacks, or of two matrices."""
    if first.dtype == dtype:
        return first @ second
    if first.is_cuda:
        return (torch.mm if first.ndim == 2 else torch.bmm)(first, second, out_dtype=dtype)
    return first.to(dtype) @ second.to(dtype)


def positive_products(rows: Tensor, weights: Tensor) -> Tensor:
    """relu(rows weights'): the largest tensor of all is written once."""
    if _has_kernels(rows, len(weights)):
        from moonopt.bench.models.mpnn_kernels import positive_products as kernel

        return kernel(rows, weights)
    return torch._addmm_activation(weights.new_zeros(len(weights)), rows, weights.T)


def where_positive(gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient of ReLU."""
    return torch.ops.aten.threshold_backward(gradient, value, 0)  # type: ignore[no-any-return]


def masked_sums(gradients: Tensor, hidden: Tensor, given: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_bij (hidden[b, i, j, c] > 0) gradients[b, i, k, j, c] given[b, i, j, f] as (K, C, F), in a wider dtype."""
    if _has_kernels(hidden, hidden.shape[3]):
        from moonopt.bench.models.mpnn_kernels import masked_sums as kernel

        return kernel(gradients, hidden, given).to(dtype)
    masked = where_positive(gradients, hidden.unsqueeze(2))
    return torch.einsum("bikjc,bijf->kcf", masked.to(dtype), given.to(dtype))


def spread(hidden: Tensor, values: Tensor) -> Tensor:
    """sum_s hidden[b, s, a, c] values[b, s, m, :] as (B, N, M, C, width)."""
    if _has_kernels(hidden):
        from moonopt.bench.models.mpnn_kernels import spread as kernel

        return kernel(hidden, values)
    return torch.einsum("bsac,bsmw->bamcw", hidden, values).contiguous()


def messages_backward(
    hidden: Tensor, given: Tensor, matrices: Tensor, count: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """What takes gradients (B, N, count, width) of what atoms get to those (B N, count, width) of what they have sent."""
    if count >= MANY and _has_kernels(hidden):
        from moonopt.bench.models.mpnn_kernels import edge_matrices, through_edges

        places, several = edge_matrices(hidden, given, matrices)
        return lambda of_got: through_edges(places, several, of_got).to(dtype)

    def by_channels(of_got: Tensor) -> Tensor:
        of_sent = spread(hidden, of_got).flatten(3).flatten(0, 2)
        return product(of_sent, matrices.mT, dtype).view(-1, count, len(matrices))

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
    if has_kernels(gradients.device) and gradients.dtype == torch.float32:
        from moonopt.bench.models.mpnn_kernels import gru_backward as kernel

        return kernel(gradients, gates, out)
    of_gates, of_state = gru_backward(gradients, gates.unsqueeze(1))
    out.copy_(of_gates)
    return of_state


def _has_kernels(tensor: Tensor, channels: int = 0) -> bool:
    return tensor.dtype == torch.float16 and channels <= MOST_CHANNELS and has_kernels(tensor.device)
