"""Inner products of task gradients, whatever pieces they come in."""

import pytest
import torch

from moonopt.tasks import gradients
from moonopt.tasks.gradients import gram_matrix, task_gradients

SHAPES = [(3, 4), (7,), (), (5, 5, 2), (1,), (40,)]


def made_up_rows(tasks, dtype=torch.float32):
    """Gradients of which some are None: those of a head, and a parameter that nobody depends on."""
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(tasks)]
    for row in rows:
        row[1] = None
    rows[0][2] = rows[1][4] = None
    return rows


def in_float64(rows):
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    flat = [
        torch.cat([(zero if g is None else g.double()).flatten() for g, zero in zip(row, zeros, strict=True)]) for row in rows
    ]
    return torch.stack(flat) @ torch.stack(flat).mT


@pytest.mark.parametrize("chunk", [1, 10, 60, 150, 2**20])
@pytest.mark.parametrize("tasks", [2, 5])
def test_the_pieces_do_not_matter(tasks, chunk, monkeypatch):
    monkeypatch.setattr(gradients, "CHUNK", chunk)
    rows = made_up_rows(tasks)
    found = gram_matrix(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, in_float64(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [[[], []], [[None], [None]]])
def test_without_any_gradient_it_is_zero(rows):
    assert gram_matrix(rows).tolist() == [[0, 0], [0, 0]]


def test_one_task_may_have_no_gradient():
    found = gram_matrix([[torch.ones(3)], [None]])
    assert found.tolist() == [[3, 0], [0, 0]]


def test_what_is_not_there_takes_no_memory():
    (filled,) = {each.untyped_storage().nbytes() for each in gradients._filled([torch.ones(1000), None, None])[1:]}
    assert filled <= 8


def test_gradients_of_half_precision_come_back_in_single_precision():
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    other = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (row,) = task_gradients([(weight.float().sum() * 0.1) + other.sum()], [weight, other, torch.ones(1, requires_grad=True)])
    assert [None if each is None else each.dtype for each in row] == [torch.float32, torch.float64, None]
    assert row[1].tolist() == [1, 1]
