"""Reading a closure's answer: which tasks it has, in which order, in which dtype, and what is refused with which words."""

import math
import re
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from moonopt.tasks.losses import detached, in_half_precision, read_losses, task_names

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


class Sides(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def scalar(value, dtype=torch.float32, requires_grad=False):
    return torch.tensor(value, dtype=dtype, requires_grad=requires_grad)


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


# Task names


def test_a_number_of_tasks_names_them_by_their_index():
    assert task_names(3) == ("0", "1", "2")


def test_names_are_kept_in_their_order():
    assert task_names(["right", "left"]) == ("right", "left")
    assert task_names(("only",)) == ("only",)


def test_names_that_occur_twice_are_refused():
    with refused(ValueError, "Task names must differ, found left, right, left."):
        task_names(["left", "right", "left"])


@pytest.mark.parametrize("tasks", [0, -1, [], (), "left", "", ["left", ""], ["left", 1], [None]])
def test_what_gives_no_names_is_refused(tasks):
    with refused(ValueError, f"tasks must be a positive number or a sequence of names, found {tasks!r}."):
        task_names(tasks)


# What a closure may return


@pytest.mark.parametrize(
    "answer",
    [
        torch.tensor([1.0, 2.0]),
        [scalar(1.0), scalar(2.0)],
        (scalar(1.0), scalar(2.0)),
        Sides(left=scalar(1.0), right=scalar(2.0)),
        {"left": scalar(1.0), "right": scalar(2.0)},
        {"right": scalar(2.0), "left": scalar(1.0)},
        OrderedDict(right=scalar(2.0), left=scalar(1.0)),
    ],
    ids=["tensor", "list", "tuple", "namedtuple", "dict", "dict in another order", "OrderedDict"],
)
def test_every_structure_gives_the_losses_in_the_order_of_the_tasks(answer):
    losses = read_losses(answer, ("left", "right"))
    assert losses.names == ("left", "right")
    assert losses.present == (True, True)
    assert losses.values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("answer", [torch.tensor([1.0, 2.0]), [scalar(1.0), scalar(2.0)]], ids=["tensor", "list"])
def test_without_tasks_a_sequence_numbers_them(answer):
    assert read_losses(answer).names == ("0", "1")


def test_without_tasks_a_dict_names_them_in_its_own_order():
    losses = read_losses({"right": scalar(2.0), "left": scalar(1.0)})
    assert losses.names == ("right", "left")
    assert losses.present == (True, True)
    assert losses.values.tolist() == [2.0, 1.0]


def test_a_dict_may_omit_tasks():
    losses = read_losses({"c": scalar(3.0), "a": scalar(1.0)}, ("a", "b", "c"))
    assert losses.names == ("a", "c")
    assert losses.present == (True, False, True)
    assert losses.values.tolist() == [1.0, 3.0]
    assert losses.rounding.shape == (2,)


def test_values_stay_in_the_graph_and_rounding_does_not():
    left, right = scalar(1.0, requires_grad=True), scalar(2.0, requires_grad=True)
    losses = read_losses({"right": 5 * right, "left": 3 * left}, ("left", "right"))
    assert not losses.rounding.requires_grad
    (losses.values @ torch.tensor([1.0, 10.0])).backward()
    assert (left.grad, right.grad) == (3.0, 50.0)


# What is refused


@pytest.mark.parametrize("answer", [torch.ones(3), [scalar(1.0)] * 3, (scalar(1.0),) * 3], ids=["tensor", "list", "tuple"])
def test_another_number_of_losses_is_refused_with_both_numbers(answer):
    with refused(ValueError, "The closure returned 3 losses, expected 2 (left, right). Return a dict to leave tasks out."):
        read_losses(answer, ("left", "right"))


@pytest.mark.parametrize("answer", [[], (), torch.ones(0)], ids=["list", "tuple", "tensor"])
@pytest.mark.parametrize("tasks", [None, ("only",)])
def test_a_sequence_without_losses_is_refused(answer, tasks):
    with pytest.raises(ValueError, match=r"^The closure returned 0 losses, expected 1 "):
        read_losses(answer, tasks)


def test_an_empty_dict_is_refused_with_the_tasks_that_were_expected():
    with refused(ValueError, "The closure returned no loss at all, expected some of left, right."):
        read_losses({}, ("left", "right"))
    with refused(ValueError, "The closure returned no loss at all, expected some of the tasks."):
        read_losses({})


@pytest.mark.parametrize("shape", [(), (2, 1), (1, 2)])
@pytest.mark.parametrize("tasks", [None, ("only",), ("left", "right")])
def test_a_tensor_that_is_not_one_dimensional_is_refused(shape, tasks):
    text = (
        f"The closure returned a tensor of shape {shape}, expected one loss per task: a 1-D tensor, a sequence or a dict "
        "of scalars."
    )
    with refused(ValueError, text):
        read_losses(torch.ones(shape), tasks)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
def test_a_loss_that_is_not_a_scalar_is_refused_with_its_task(shape):
    text = f"The loss of task 'right' has shape {shape}, expected a scalar: take its mean or its sum."
    with refused(ValueError, text):
        read_losses({"right": torch.ones(shape), "left": scalar(1.0)}, ("left", "right"))
    with refused(ValueError, text):
        read_losses([scalar(1.0), torch.ones(shape)], ("left", "right"))


@pytest.mark.parametrize(("loss", "kind"), [(1.0, "float"), (None, "NoneType"), ([1.0], "list")])
def test_a_loss_that_is_not_a_tensor_is_refused_with_its_task(loss, kind):
    text = f"The loss of task 'right' is a {kind}, expected a tensor with one number."
    with refused(TypeError, text):
        read_losses([scalar(1.0), loss], ("left", "right"))
    with refused(TypeError, text):
        read_losses({"right": loss}, ("left", "right"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_loss_that_is_not_floating_point_is_refused_with_its_task(dtype):
    text = f"The loss of task 'left' has dtype {dtype}, expected a floating point one."
    with refused(TypeError, text):
        read_losses(torch.ones(2, dtype=dtype), ("left", "right"))
    with refused(TypeError, text):
        read_losses({"left": scalar(1, dtype)}, ("left", "right"))


@pytest.mark.parametrize(
    ("answer", "kind"), [("left", "str"), (None, "NoneType"), (1.0, "float"), (set(), "set"), (iter(()), "tuple_iterator")]
)
def test_what_is_no_structure_of_losses_is_refused(answer, kind):
    with refused(TypeError, f"The closure returned {kind}, expected a 1-D tensor, a sequence or a dict of scalar losses."):
        read_losses(answer, ("left", "right"))


def test_an_unknown_task_is_refused_with_the_nearest_one():
    text = "Unknown task in the closure's losses 'rihgt': expected one of left, right. Did you mean 'right'?"
    with refused(ValueError, text):
        read_losses({"left": scalar(1.0), "rihgt": scalar(1.0)}, ("left", "right"))


def test_an_unknown_task_far_from_all_others_is_refused_without_a_guess():
    with refused(ValueError, "Unknown task in the closure's losses 'depth': expected one of left, right."):
        read_losses({"depth": scalar(1.0)}, ("left", "right"))


# Dtypes and rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_half_precision_becomes_float32_and_more_is_kept(dtype, as_tensor):
    answer = torch.tensor([1.5, 2.0], dtype=dtype)
    values = read_losses(answer if as_tensor else list(answer)).values
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert values.tolist() == [1.5, 2.0]


def test_losses_of_several_dtypes_take_the_widest():
    values = read_losses([scalar(1.5, torch.bfloat16), scalar(1 / 3, torch.float64)]).values
    assert values.dtype == torch.float64
    assert values.tolist() == [1.5, 1 / 3]


def test_bfloat16_and_float16_together_become_float32():
    losses = read_losses([scalar(1.0, torch.bfloat16), scalar(2049 / 2048, torch.float16)])
    assert losses.values.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_the_spacing_of_the_closures_own_dtype(dtype):
    losses = read_losses(torch.tensor([2.0, -0.5, 0.0], dtype=dtype))
    eps = torch.finfo(dtype).eps
    assert losses.rounding.dtype == losses.values.dtype
    assert losses.rounding.tolist() == [2 * eps, 0.5 * eps, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_bounds_what_the_dtype_does_to_a_number(dtype):
    exact = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.01
    losses = read_losses(exact.to(dtype))
    assert ((losses.values.double() - exact).abs() <= losses.rounding.double()).all()


@pytest.mark.parametrize("value", [0.25, 1.0, math.e, 1e4])
def test_log_gives_logarithms_and_their_rounding(value):
    losses = read_losses([scalar(value, torch.bfloat16)], ("only",))
    logs, eps = losses.log(), torch.finfo(torch.bfloat16).eps
    assert logs.names == ("only",)
    assert logs.present == (True,)
    assert logs.values.item() == pytest.approx(math.log(losses.values.item()), rel=1e-6)
    assert logs.rounding.item() == pytest.approx(eps * (1 + abs(math.log(losses.values.item()))), rel=1e-6)


@pytest.mark.parametrize("value", [1e-3, 0.25, 1.0, 1e4])
def test_the_rounding_of_a_logarithm_bounds_what_the_rounding_of_the_loss_does(value):
    losses = read_losses([scalar(value, torch.float16)])
    further = (losses.values + losses.rounding).log()
    assert 0 < (further - losses.log().values).item() <= losses.log().rounding.item()


def test_log_keeps_the_graph_of_its_values_alone():
    loss = scalar(4.0, requires_grad=True)
    logs = read_losses([loss]).log()
    assert not logs.rounding.requires_grad
    logs.values.sum().backward()
    assert loss.grad.item() == 0.25


def test_the_log_of_a_loss_that_is_not_positive_is_not_finite():
    assert read_losses(torch.tensor([-1.0, 0.0, 1.0])).log().values.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_seen_in_every_structure(dtype):
    loss, exact = scalar(1.0, dtype), scalar(1.0)
    answers = [loss.reshape(1), [exact, loss], (exact, loss), {"a": exact, "b": loss}]
    assert [in_half_precision(answer) for answer in answers] == [dtype in (torch.bfloat16, torch.float16)] * 4


# Detached answers


def test_detached_keeps_the_structure():
    left, right = (scalar(value, requires_grad=True) for value in (1.0, 2.0))
    answers = [torch.stack([left, right]), [left, right], (left, right), Sides(left, right), {"right": right, "left": left}]
    for answer in answers:
        found = detached(answer)
        assert type(found) is type(answer)
        if isinstance(answer, torch.Tensor):
            assert found.tolist() == [1.0, 2.0]
            assert not found.requires_grad
            continue
        if isinstance(answer, dict):
            assert list(found) == ["right", "left"]
            found = (found["left"], found["right"])
        assert [loss.item() for loss in found] == [1.0, 2.0]
        assert not any(loss.requires_grad for loss in found)


def test_detached_keeps_the_fields_of_a_namedtuple():
    found = detached(Sides(left=scalar(1.0), right=scalar(2.0)))
    assert (found.left.item(), found.right.item()) == (1.0, 2.0)


def test_detached_leaves_the_answer_itself_in_the_graph():
    answer = [scalar(1.0, requires_grad=True)]
    detached(answer)
    assert answer[0].requires_grad


def test_a_dict_may_have_the_numbers_of_tasks():
    found = read_losses({1: scalar(2.0), 0: scalar(1.0)}, task_names(3))
    assert (found.names, found.values.tolist()) == (("0", "1"), [1.0, 2.0])
    with pytest.raises(ValueError, match="two losses of one task"):
        read_losses({0: scalar(1.0), "0": scalar(2.0)}, task_names(2))
    with pytest.raises(ValueError, match=r"^Unknown task in the closure's losses '7': expected one of 0, 1\."):
        read_losses({0: scalar(1.0), 7: scalar(2.0)}, task_names(2))


def test_detached_keeps_the_kind_of_dict():
    answer = OrderedDict(a=torch.tensor(1.0, requires_grad=True))
    assert isinstance(detached(answer), OrderedDict)
    assert not detached(answer)["a"].requires_grad
    assert answer["a"].requires_grad
