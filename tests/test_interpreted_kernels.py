"""Kernels of our own: where there is no GPU Triton interprets them, if it is told so before it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
OPTIMIZERS, MOLECULES = HERE / "linalg" / "interpreted_kernels.py", HERE / "bench" / "interpreted_mpnn_kernels.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("tests", [OPTIMIZERS, MOLECULES], ids=lambda path: path.stem)
def test_kernels_pass_their_tests(tests):
    on_gpu = torch.cuda.is_available()
    if on_gpu and tests == OPTIMIZERS:
        pytest.skip("test_own_kernels.py runs them on the GPU")
    words = [sys.executable, "-m", "pytest", str(tests), "-p", "no:cacheprovider"]
    environment = os.environ if on_gpu else os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
