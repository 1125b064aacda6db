import pytest
import torch

from moonopt.tasks.modes import multiplying

CUDNN, MATRICES = torch.backends.cudnn, torch.backends.cuda.matmul
NEWER = (MATRICES, torch.backends.mkldnn.matmul, CUDNN.conv, CUDNN.rnn)


@pytest.fixture(autouse=True)
def switches():
    """What torch was told stays what it was told, whatever a test has said."""
    newer = [each.fp32_precision for each in NEWER]
    yield
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True
    for each, precision in zip(NEWER, newer, strict=True):
        each.fp32_precision = precision


@pytest.mark.parametrize(("tf32", "precision"), [(False, "highest"), (True, "high")])
@pytest.mark.parametrize("said", ["highest", "high", "medium"])
def test_matrices_and_convolutions_are_multiplied_as_asked_for_and_afterwards_as_before(said, tf32, precision):
    torch.set_float32_matmul_precision(said)
    newer = [each.fp32_precision for each in NEWER]
    with multiplying(tf32):
        assert torch.get_float32_matmul_precision() == precision
        assert CUDNN.allow_tf32 == tf32
    assert (torch.get_float32_matmul_precision(), CUDNN.allow_tf32) == (said, True)
    assert [each.fp32_precision for each in NEWER] == newer


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("products", [MATRICES, CUDNN.conv])
def test_one_kind_of_products_may_have_been_told_something_else_by_itself(products, tf32):
    products.fp32_precision = unlike = "ieee" if products is CUDNN.conv else "tf32"
    with pytest.raises(RuntimeError, match="PyTorch is checking"):
        torch.get_float32_matmul_precision(), CUDNN.allow_tf32
    with multiplying(tf32):
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert CUDNN.allow_tf32 == tf32
    assert products.fp32_precision == unlike
