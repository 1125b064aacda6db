"""Kernels of our own where there is no GPU: Triton interprets them, if it is told so before it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TESTS = [HERE / "linalg" / "interpreted_kernels.py", HERE / "bench" / "interpreted_mpnn_kernels.py"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_own_kernels.py and test_mpnn_rounds.py run them on the GPU")
@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.stem)
def test_kernels_pass_their_tests_in_the_interpreter_of_triton(tests):
    words = [sys.executable, "-m", "pytest", str(tests), "-p", "no:cacheprovider"]
    done = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
