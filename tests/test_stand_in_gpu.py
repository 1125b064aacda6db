"""Steps on a GPU that has no numbers, where there is no real one: what waits for it, or mixes devices, fails."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "stand_in_gpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs steps on the GPU")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA, beside which the stand-in has a place")
def test_steps_on_a_gpu_wait_for_nothing_and_mix_no_devices(tmp_path):
    library, torch_folder = tmp_path / "gpu.so", Path(importlib.util.find_spec("torch").origin).parent
    compiling = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", HERE / "gpu_without_numbers.cpp"]
    linking = [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib", "-o", library]
    subprocess.run([*compiling, *linking], check=True)
    words = [sys.executable, "-m", "pytest", "-p", "gpu_without_numbers", "-p", "no:cacheprovider", HERE / "steps.py"]
    environment = os.environ | {"STAND_IN_GPU": str(library), "PYTHONPATH": str(HERE)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
