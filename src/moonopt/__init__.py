"""Train one model on several objectives at once: MOON (Multi-Objective OrthoNormalized updates), Muon and every baseline."""

from moonopt.analysis.stationarity import certificate_gap, pareto_stationarity
from moonopt.balance import Balanced
from moonopt.linalg.dual import Dual, solve_dual
from moonopt.linalg.polar import polar
from moonopt.methods import build
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.optim.parameters import Split, route_parameters
from moonopt.tasks.capture import capture

__all__ = [
    "MOON",
    "Balanced",
    "Dual",
    "Muon",
    "Split",
    "build",
    "capture",
    "certificate_gap",
    "pareto_stationarity",
    "polar",
    "route_parameters",
    "solve_dual",
]
__version__ = "0.1.0"
