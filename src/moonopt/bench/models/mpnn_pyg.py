"""The message-passing network of QM9 out of torch_geometric's parts, as public codes build it: the reference for ``MPNN``."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import MoleculeBatch
from moonopt.errors import UserError

#: Torch's recurrent layers add it to the names that a cell gives to its parameters.
LAYER = "_l0"


class Graphs(NamedTuple):
    """The molecules of a MoleculeBatch one below the other, without padding."""

    atoms: Tensor  # (atoms, features)
    ends: Tensor  # (2, edges): from which atom, to which
    edges: Tensor  # (edges, features)
    molecule: Tensor  # that each atom is in, (atoms,)
    total: int  # of molecules


def graphs(molecules: MoleculeBatch) -> Graphs:
    """The same molecules as torch_geometric takes them."""
    members = molecules.members
    mask = members.any(2)
    numbers = (mask.flatten().cumsum(0) - 1).view_as(mask)
    row, target, source = molecules.neighbours.nonzero(as_tuple=True)
    ends = torch.stack([numbers[row, source], numbers[row, target]])
    edges = molecules.edges[row, target, source]
    row, _, which = members.nonzero(as_tuple=True)
    in_a_row = members.shape[2]
    return Graphs(molecules.atoms[mask], ends, edges, row * in_a_row + which, len(members) * in_a_row)


class PyGNet(MPNN):
    """``MPNN`` with NNConv, GRU and Set2Set of torch and torch_geometric; the same seed gives the same parameters.

    It makes a matrix of width x width for every edge in every round, and waits for the device where shapes depend on values.
    ``readout_of_graphs`` takes molecules without padding, for measurements in which they are prepared beforehand.
    """

    def __init__(self, tasks: Iterable[str], *, half_messages: bool = False, **sizes: int) -> None:
        pyg = _torch_geometric()
        if half_messages:
            raise UserError("The PyG form has no half_messages: it is the reference. Take the dense one.")
        super().__init__(tasks, half_messages=False, **sizes)
        ours, width = self.conv, len(self.conv.bias)
        self.conv = pyg.NNConv(width, width, nn.Identity(), aggr="mean")
        # The root weight is torch's Linear, because route_parameters takes that of torch_geometric for a free parameter.
        self.conv.nn, self.conv.lin, self.conv.bias = ours.nn, ours.lin, ours.bias
        self.gru = _with_parameters_of(self.gru, nn.GRU(width, width))
        lstm = _with_parameters_of(self.set2set.lstm, nn.LSTM(2 * width, width))
        self.set2set = pyg.Set2Set(width, self.set2set.steps)
        self.set2set.lstm = lstm

    def readout(self, molecules: MoleculeBatch) -> Tensor:
        return self.readout_of_graphs(graphs(molecules))

    def readout_of_graphs(self, given: Graphs) -> Tensor:
        """What Set2Set makes of the atoms after the last round, (molecules, 2 width)."""
        x = self.embedding(given.atoms).relu()
        hidden = x.unsqueeze(0)
        for _ in range(self.rounds):
            message = self.conv(x, given.ends, given.edges).relu()
            output, hidden = self.gru(message.unsqueeze(0), hidden)
            x = output.squeeze(0)
        return self.set2set(x, given.molecule, dim_size=given.total)  # type: ignore[no-any-return]


def to_pyg(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``state_dict`` of an ``MPNN`` for a ``PyGNet``."""
    return {f"{name}{LAYER}" if _is_recurrent(name) else name: value for name, value in state.items()}


def from_pyg(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``state_dict`` of a ``PyGNet`` for an ``MPNN``."""
    return {name.removesuffix(LAYER): value for name, value in state.items()}


def _is_recurrent(name: str) -> bool:
    return name.startswith(("gru.", "set2set.lstm."))


def _with_parameters_of(cell: nn.Module, layer: nn.RNNBase) -> Any:
    for name, parameter in cell.named_parameters():
        setattr(layer, f"{name}{LAYER}", parameter)
    return layer


def _torch_geometric() -> Any:
    try:
        return importlib.import_module("torch_geometric.nn")
    except ModuleNotFoundError as error:
        raise UserError(
            f"PyGNet needs torch_geometric, but {error.name} is not installed: pip install 'moonopt[graph]', or take MPNN, "
            "which computes the same."
        ) from error
