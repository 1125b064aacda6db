"""A seed fixes everything, and a state that is restored continues the same numbers."""

import random

import numpy as np
import pytest
import torch

from moonopt.runs.reproducible import (
    deterministic,
    epoch_order,
    generator_of,
    random_state,
    restore_random_state,
)


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        *torch.rand(2).tolist(),
        torch.randn(1).item(),
    ]


def test_a_restored_state_continues_every_generator(tmp_path):
    draw()  # an odd number of normal numbers: Python and NumPy keep the other of a pair
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draw(), draw()
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (draw(), draw()) == expected


def test_a_seed_fixes_every_generator_and_everything_is_as_it_was_afterwards():
    torch.backends.cudnn.benchmark = True
    before = random_state()
    try:
        drawn = []
        for seed in (3, 3, 4):
            with deterministic(seed, threads=2):
                drawn.append(draw())
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.backends.cudnn.benchmark
                assert not torch.utils.deterministic.fill_uninitialized_memory
                assert torch.get_num_threads() == 2
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.get_num_threads() == 1
    after = random_state()
    assert torch.equal(after.pop("torch"), before.pop("torch"))
    assert after == before


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_every_seed_that_a_cell_takes_is_taken(seed):
    with deterministic(seed):
        draw()


def test_generators_differ_with_every_number():
    numbers = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0), ("0", 0, 0)]
    assert len({torch.rand(1, generator=generator_of(*each)).item() for each in numbers}) == len(numbers)
    assert torch.equal(torch.rand(3, generator=generator_of(1, "a")), torch.rand(3, generator=generator_of(1, "a")))


def test_an_epoch_is_a_permutation_and_every_epoch_is_another():
    first, second = (torch.cat(epoch_order(12, 4, None, seed=0, epoch=epoch)).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != torch.cat(epoch_order(12, 4, None, seed=1, epoch=1)).tolist()


@pytest.mark.parametrize(
    ("length", "size", "batches", "sizes"), [(10, 4, 5, [4] * 5), (3, 8, None, [3]), (3, 8, 2, [3, 3]), (8, 2, 3, [2] * 3)]
)
def test_an_epoch_has_as_many_full_batches_as_asked_for(length, size, batches, sizes):
    order = epoch_order(length, size, batches, seed=0, epoch=0)
    assert [batch.numel() for batch in order] == sizes
    assert all(len(set(batch.tolist())) == len(batch) for batch in order)
