"""Kernels of our own, where they are faster than torch's; torch's everywhere else."""

from moonopt.linalg.kernels.presence import can_stream
from moonopt.linalg.kernels.products import Products, products_for

__all__ = ["Products", "can_stream", "products_for"]
