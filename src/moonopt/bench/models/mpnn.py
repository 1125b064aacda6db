"""The message-passing network of QM9 (Gilmer et al., 2017; sizes as in Nash-MTL) in plain torch, on padded molecules.

With 11 tasks 610,944 of its 617,675 parameters are in matrices, all weights but those of embedding and heads: the 98.91 % that
the paper counts. The edge network's second layer alone has 524,288: one matrix, stored as (64 * 64, 128).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moonopt.bench.models import heads
from moonopt.bench.models.mpnn_molecules import ATOM_FEATURES, EDGE_FEATURES, MoleculeBatch
from moonopt.bench.models.mpnn_parts import ALIGNED, HALF_ALIGNED
from moonopt.bench.models.mpnn_readout import fused_readout
from moonopt.bench.models.mpnn_rounds import Factors, half_rounds

#: What the edge convolution has in channels beside the hidden ones: shares and loops.
PASSED = 2
#: Far below the scores of atoms, sums of as many products as they are wide with numbers below 1, and a number in half
#: precision. Not -inf: the softmax over none but these would not be a number.
ABSENT = -3e4


class MPNN(nn.Module):
    """An embedding of atoms, rounds of messages with shared weights, Set2Set, a layer, one linear head per task.

    ``PyGNet`` computes the same with torch_geometric, from the same parameters.

    Args:
        tasks: their names, one number of each molecule per task.
        atom_features: how many each atom has.
        edge_features: how many each pair of atoms has.
        width: of atoms between the rounds.
        edge_width: hidden width of the network that makes a matrix of an edge.
        rounds: of messages.
        readout_steps: of Set2Set.
        half_messages: keep what edges hide and atoms send in float16: faster on a GPU, see ``mpnn_rounds``.

    >>> batch = MoleculeBatch(torch.zeros(5, 4, 11), torch.zeros(5, 4, 4, 5), torch.ones(5, 4, 1, dtype=torch.bool))
    >>> {task: tuple(predicted.shape) for task, predicted in MPNN(["mu", "alpha"])(batch).items()}
    {'mu': (5,), 'alpha': (5,)}

    """

    def __init__(
        self,
        tasks: Iterable[str],
        *,
        atom_features: int = ATOM_FEATURES,
        edge_features: int = EDGE_FEATURES,
        width: int = 64,
        edge_width: int = 128,
        rounds: int = 3,
        readout_steps: int = 3,
        half_messages: bool = False,
    ) -> None:
        super().__init__()
        self.rounds = rounds
        self.half_messages = half_messages
        self.embedding = nn.Linear(atom_features, width)
        self.conv = EdgeConvolution(width, edge_features, edge_width)
        self.gru = nn.GRUCell(width, width)
        self.set2set = Set2Set(width, readout_steps)
        self.out = nn.Linear(2 * width, width)
        self.heads = nn.ModuleDict({task: nn.Linear(width, 1) for task in tasks})

    def forward(self, molecules: MoleculeBatch) -> dict[str, Tensor]:
        """What every task predicts of all molecules, row by row; where a row has fewer than others, it means nothing."""
        return self.predictions(self.readout(molecules))

    def readout(self, molecules: MoleculeBatch) -> Tensor:
        """What Set2Set makes of the atoms after the last round, (molecules, 2 width)."""
        x = self.embedding(molecules.atoms).relu()
        return self.set2set(self._after_rounds(x, molecules), molecules.members, self.half_messages)  # type: ignore[no-any-return]

    def predictions(self, readout: Tensor) -> dict[str, Tensor]:
        """What the tasks make of it."""
        found = heads.predictions(self.out(readout).relu(), self.heads)
        return {task: each.squeeze(1) for task, each in found.items()}

    def _after_rounds(self, x: Tensor, molecules: MoleculeBatch) -> Tensor:
        if self.half_messages and self.rounds:
            return half_rounds(x, self.conv.factors(molecules, HALF_ALIGNED), self.conv.bias, self.gru, self.rounds)
        edges = self.conv.edges(molecules)
        for _ in range(self.rounds):
            x = self.gru(self.conv(x, edges).relu().flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return x


class Edges(NamedTuple):
    """What the messages of all rounds have in common, in two factors: an atom gets hidden @ (x @ matrices)."""

    hidden: Tensor  # numbers of every edge, (B, N, N * channels)
    matrices: Tensor  # one for each of these channels, (width, channels * width)


class EdgeConvolution(nn.Module):
    """NNConv: x_i <- root x_i + bias + mean over neighbours j of W(e_ij)' x_j, with W(e) = A h(e) + b as a square matrix.

    No W(e) is ever made: sum_j W(e_ij)' x_j = sum_jk h_k(e_ij) (A_k' x_j) + b' sum_j x_j. A round takes N^2 hidden width +
    N hidden width^2 multiplications per row of N atoms in place of N (N - 1) hidden width^2 per molecule: 16 million for each
    of two molecules that share 37 places, against 160 million for an average one, of 18 atoms, without padding.

    The other two terms are channels beside the hidden ones, so that a round is two products and few kernels: the share of j in
    the mean, with b for its matrix, and 1 where j is i, with the root's. Channels of zeros make their number a multiple of
    ``aligned``.
    """

    def __init__(self, width: int, edge_features: int, edge_width: int) -> None:
        super().__init__()
        self.nn = nn.Sequential(nn.Linear(edge_features, edge_width), nn.ReLU(), nn.Linear(edge_width, width * width))
        self.lin = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def edges(self, molecules: MoleculeBatch) -> Edges:
        """What depends on the edges alone, once for all rounds."""
        given, weights, matrices = self.factors(molecules)
        return Edges(functional.linear(given, weights).relu().flatten(2), matrices)

    def factors(self, molecules: MoleculeBatch, aligned: int = ALIGNED) -> Factors:
        """What the messages are made of, with a multiple of so many channels."""
        shares = molecules.shares.unsqueeze(3)
        loops = torch.eye(shares.shape[1], dtype=shares.dtype, device=shares.device).view(1, *shares.shape[1:])
        first, second = self._layers()
        (channels, features), width = first.weight.shape, len(self.bias)
        spare = -(channels + PASSED) % aligned
        # share * relu(weight e + bias) = relu(weight (share e) + bias share): the large tensor is made at once. A column of
        # zeros makes eight of QM9's seven, for the same reason as above.
        given = torch.cat([shares * molecules.edges, shares, loops.expand_as(shares), torch.zeros_like(shares)], 3)
        rows = functional.pad(torch.cat([first.weight, first.bias.unsqueeze(1)], 1), (0, 2))  # nothing of loops and zeros
        passed = torch.eye(PASSED, dtype=rows.dtype, device=rows.device)
        passed = functional.pad(passed, (features, 1, 0, spare))  # rows that hand on shares and loops
        several = second.weight.view(width, width, -1).transpose(1, 2)
        others = second.bias.view(width, 1, width), self.lin.weight.T.unsqueeze(1), rows.new_zeros(width, spare, width)
        return Factors(given, torch.cat([rows, passed]), torch.cat([several, *others], 1).flatten(1))

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Atoms (B, N, width) after one round."""
        # All A_k' x_j first: as many products as sum_j h_k x_j first, and the large tensors are multiplied as they lie.
        sent = (x @ edges.matrices).view(len(x), -1, len(self.bias))
        return torch.baddbmm(self.bias, edges.hidden, sent)

    def _layers(self) -> tuple[nn.Linear, nn.Linear]:
        return self.nn[0], self.nn[2]  # type: ignore[return-value]


class Set2Set(nn.Module):
    """A molecule from its atoms (Vinyals et al., 2016): an LSTM asks, attention over the atoms answers, several times."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.lstm = nn.LSTMCell(2 * width, width)

    def forward(self, x: Tensor, members: Tensor, fused: bool = False) -> Tensor:
        """The last question and its answer of all molecules, row by row, (B M, 2 width); without atoms it means nothing."""
        unlikely, total, width = (~members.mT * ABSENT).to(x.dtype), len(members) * members.shape[2], x.shape[2]
        if fused and self.steps:
            return fused_readout(x, unlikely, self.lstm, self.steps)
        question = cell = x.new_zeros(total, width)
        both = x.new_zeros(total, 2 * width)
        for _ in range(self.steps):
            question, cell = self.lstm(both, (question, cell))
            attention = torch.baddbmm(unlikely, question.view(len(x), -1, width), x.mT).softmax(2)
            both = torch.cat([question, (attention @ x).flatten(0, 1)], 1)
        return both
