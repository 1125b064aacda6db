"""Peak memory of the gradient engines at 40 tasks, on a GPU; without one the measurement says so."""

import pytest
import torch

from moonopt.speed import memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is measured on a GPU")
def test_columns_need_little_more_than_a_summed_loss_and_stored_rows_a_gradient_per_task():
    found = memory.measure()
    peaks, gradient = found["peaks"], found["gradient"]
    assert peaks["mgda, columns"] <= 1.2 * peaks["ls"]
    assert peaks["mgda, stored"] <= 1.02 * peaks["kept graph"] + (found["tasks"] + 1) * gradient
    assert peaks["mgda, blocked:4"] <= 1.02 * peaks["kept graph"] + 7 * gradient


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        memory.main(["--json"])
    assert "argument --device: cuda is not there" in capsys.readouterr().err
