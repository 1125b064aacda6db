import pytest
import torch

from moonopt.tasks.modes import multiplying


@pytest.mark.parametrize(("tf32", "precision"), [(False, "highest"), (True, "high")])
def test_matrices_and_convolutions_are_multiplied_as_asked_for_and_afterwards_as_before(tf32, precision):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with multiplying(tf32):
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 == tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
