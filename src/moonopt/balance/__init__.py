"""Second floor: balancers, each a way to make one loss of the losses of several tasks, and the optimizer around them."""

from moonopt.balance.balanced import Balanced
from moonopt.balance.base import Aggregator, Balancer
from moonopt.balance.cagrad import CAGrad
from moonopt.balance.dwa import DWA
from moonopt.balance.famo import FAMO
from moonopt.balance.graddrop import GradDrop
from moonopt.balance.gradnorm import GradNorm
from moonopt.balance.imtl import IMTLG
from moonopt.balance.linear import LS, SI, STL
from moonopt.balance.mgda import MGDA
from moonopt.balance.nash import NashMTL
from moonopt.balance.pcgrad import PCGrad
from moonopt.balance.rlw import RLW
from moonopt.balance.torchjd import FromTorchJD
from moonopt.balance.uncertainty import UW

__all__ = [
    "DWA",
    "FAMO",
    "IMTLG",
    "LS",
    "MGDA",
    "RLW",
    "SI",
    "STL",
    "UW",
    "Aggregator",
    "Balanced",
    "Balancer",
    "CAGrad",
    "FromTorchJD",
    "GradDrop",
    "GradNorm",
    "NashMTL",
    "PCGrad",
]
