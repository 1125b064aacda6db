"""Benchmarks: one file each, with its data, model, losses, metrics and settings. ``find`` has them by name."""

from moonopt.bench.base import Benchmark, Data, Items, Published, Splits, Tensors
from moonopt.bench.metrics import Metric, delta_m
from moonopt.bench.registry import BENCHMARKS, find

__all__ = ["BENCHMARKS", "Benchmark", "Data", "Items", "Metric", "Published", "Splits", "Tensors", "delta_m", "find"]
