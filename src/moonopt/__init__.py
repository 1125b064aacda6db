"""Train one model on several objectives at once: MOON (Multi-Objective OrthoNormalized updates) and Muon."""

from moonopt.analysis.stationarity import certificate_gap, pareto_stationarity
from moonopt.linalg.dual import Dual, solve_dual
from moonopt.linalg.polar import polar
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.optim.parameters import Split, route_parameters

__all__ = [
    "MOON",
    "Dual",
    "Muon",
    "Split",
    "certificate_gap",
    "pareto_stationarity",
    "polar",
    "route_parameters",
    "solve_dual",
]
__version__ = "0.1.0"
