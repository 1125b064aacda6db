"""Learning-rate schedules by name, against their formulas."""

import math

import pytest
import torch

from moonopt.errors import UserError
from moonopt.runs.schedules import Schedule


def rates(name, steps=10, per_epoch=2, scores=(), resume_at=None):
    """The rate of every step; perhaps with a second schedule that goes on from the state of the first."""

    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, Schedule(optimizer, name, steps, per_epoch, has_validation=True)

    optimizer, schedule = made()
    found = []
    for step in range(steps):
        if step == resume_at:
            states = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = made()
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
        if scores and step % per_epoch == per_epoch - 1:
            schedule.after_evaluation(scores[step // per_epoch])
    return found


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("constant", lambda step: 1.0),
        ("cosine", lambda step: (1 + math.cos(math.pi * step / 10)) / 2),
        ("linear", lambda step: 1 - step / 10),
        ("step:2:0.5", lambda step: 0.5 ** (step // 4)),
        ("step:0.5:0.1", lambda step: 0.1**step),
    ],
)
def test_a_schedule_has_its_formula(name, formula):
    assert rates(name) == pytest.approx([formula(step) for step in range(10)], abs=1e-12)


def test_a_plateau_waits_for_evaluations_without_progress():
    assert rates("plateau:0.5:1", scores=[3.0, 2.0, 2.0, 2.0, 1.0]) == [1.0] * 8 + [0.5] * 2


def test_a_plateau_leaves_a_hundredth_of_the_rate():
    assert rates("plateau:0.05:0", scores=[1.0] * 5) == [1.0] * 4 + [0.05] * 2 + [0.01] * 4


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "step:2:0.5", "plateau:0.5:1"])
def test_a_schedule_goes_on_from_its_state(name):
    scores = [3.0, 2.0, 2.0, 2.0, 1.0]
    for step in (1, 4, 7):
        assert rates(name, scores=scores, resume_at=step) == rates(name, scores=scores)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cosines", "Unknown train.schedule 'cosines': expected one of constant, cosine, .* Did you mean 'cosine'?"),
        ("cosine:3", "train.schedule=cosine takes 0 numbers, as in cosine; found 'cosine:3'"),
        ("step:a:b", "train.schedule=step takes 2 numbers, as in step:100:0.5; found 'step:a:b'"),
        ("step:0:0.5", "at least one step"),
        ("step:nan:0.5", "at least one step"),
        ("step:inf:0.5", "cannot convert"),
        ("plateau:1.5:2", "Factor"),
    ],
)
def test_what_is_no_schedule_is_told(name, text):
    with pytest.raises(UserError, match=text):
        rates(name)
