"""Kernels of our own, where they are faster than torch's; torch's everywhere else."""

from moonopt.linalg.kernels.presence import LARGE, can_stream, cpu_multiplies_bfloat16
from moonopt.linalg.kernels.products import Products, products_for

__all__ = ["LARGE", "Products", "can_stream", "cpu_multiplies_bfloat16", "products_for"]
