"""Conflict between tasks on matrices made by hand, against numpy's SVD, and under maps that must not matter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moonopt.analysis.conflict import conflict_rate, cosine_matrix

few = settings(max_examples=40, deadline=None, derandomize=True)
GEOMETRIES = ("euclidean", "spectral")
geometries = st.sampled_from(GEOMETRIES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagonals(*diagonals: tuple[float, ...]) -> Tensor:
    return torch.stack([torch.tensor(each, dtype=torch.float64).diag() for each in diagonals])


def orthogonal(side: int, seed: int) -> Tensor:
    return torch.linalg.qr(gaussian(side, side, seed=seed)).Q


@st.composite
def several_blocks(draw: st.DrawFn) -> tuple[list[Tensor], list[float]]:
    """Blocks of any shape and rank whose entries are of any size, and a scale for each."""
    tasks, seed = draw(st.integers(1, 5)), draw(st.integers(0, 2**32 - 1))
    blocks = []
    for index in range(draw(st.integers(1, 3))):
        p, q, rank = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(0, 6))
        size = 10 ** draw(st.floats(-3, 3))
        blocks.append(size * gaussian(tasks, p, rank, seed=seed + index) @ gaussian(tasks, rank, q, seed=seed + index + 10))
    return blocks, draw(st.lists(st.floats(0.1, 10), min_size=len(blocks), max_size=len(blocks)))


def polar_in_numpy(matrix: np.ndarray) -> np.ndarray:
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    kept = s > 1e-10 * s.max()
    return u[:, kept] @ vh[kept]


def spectral_in_numpy(blocks: list[Tensor], scale: list[float]) -> np.ndarray:
    arrays = [block.numpy() for block in blocks]
    tasks = range(len(arrays[0]))
    best = [sum(s * np.linalg.norm(g[j], "nuc") for s, g in zip(scale, arrays, strict=True)) for j in tasks]
    gained = [
        [sum(s * (polar_in_numpy(g[i]) * g[j]).sum() for s, g in zip(scale, arrays, strict=True)) for j in tasks] for i in tasks
    ]
    return np.array([[gained[i][j] / best[j] if best[j] else 0.0 for j in tasks] for i in tasks])


def assert_close(found: Tensor, expected: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


# By hand


def test_cosines_of_two_matrices_by_hand():
    gradients = diagonals((3.0, 1.0), (-1.0, 2.0))
    assert_close(cosine_matrix(gradients), [[1, -1 / math.sqrt(50)], [-1 / math.sqrt(50), 1]])
    # The best step of the first is the identity, which gives the second -1 + 2 of its 3.
    assert_close(cosine_matrix(gradients, "spectral"), [[1, 1 / 3], [-2 / 4, 1]])


def test_the_two_geometries_may_disagree_about_conflict():
    gradients = diagonals((3.0, 1.0), (-1.0, 2.0))
    assert conflict_rate(gradients) == 1
    assert conflict_rate(gradients, "spectral") == 0.5
    agreeing = diagonals((5.0, 1.0, 1.0), (1.0, -1.0, -1.0))
    assert conflict_rate(agreeing) == 0
    assert conflict_rate(agreeing, "spectral") == 1 / 2


def test_opposed_tasks_have_cosine_minus_one():
    matrix = gaussian(3, 5)
    for geometry in GEOMETRIES:
        assert_close(cosine_matrix(torch.stack([matrix, -2 * matrix]), geometry), [[1, -1], [-1, 1]])
        assert conflict_rate(torch.stack([matrix, -2 * matrix]), geometry) == 1


def test_cosines_of_the_two_tasks_of_the_paper():
    gradients = torch.tensor([[[2.0, 1.0], [-1.0, 1.0]], [[2.0, -1.0], [1.0, 1.0]]])
    assert_close(cosine_matrix(gradients), [[1, 3 / 7], [3 / 7, 1]])
    # Their polar factors are rotations by plus and minus atan(2 / 3), each of nuclear norm sqrt(13).
    assert_close(cosine_matrix(gradients, "spectral"), [[1, 5 / 13], [5 / 13, 1]])


def test_blocks_count_together():
    first, second = gaussian(2, 3, 4), gaussian(2, 5, 2, seed=1)
    flat = torch.cat([first.flatten(1), second.flatten(1)], dim=1)
    expected = torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0)
    assert_close(cosine_matrix([first, second])[0, 1], expected)
    # Two blocks are the block-diagonal matrix of both, in either geometry.
    together = torch.stack([torch.block_diag(first[i], second[i]) for i in range(2)])
    for geometry in GEOMETRIES:
        assert_close(cosine_matrix([first, second], geometry), cosine_matrix(together, geometry))


def test_scale_weighs_the_blocks_of_the_spectral_geometry():
    agree, oppose = diagonals((1.0,), (1.0,)), diagonals((1.0,), (-1.0,))
    assert_close(cosine_matrix([agree, oppose], "spectral", scale=[3.0, 1.0]), [[1, 0.5], [0.5, 1]])
    assert_close(cosine_matrix([agree, oppose], "spectral", scale=[1.0, 0.0]), torch.ones(2, 2))
    assert conflict_rate([agree, oppose], "spectral", scale=[1.0, 3.0]) == 1


def test_rate_is_the_share_of_ordered_pairs():
    # Euclidean cosines are negative for the pair (0, 1) alone: two of the six ordered pairs.
    assert conflict_rate(torch.tensor([[[1.0, 0.0]], [[-1.0, 1.0]], [[0.0, 1.0]]])) == 2 / 6
    opposed = torch.stack([sign * torch.eye(2) for sign in (1.0, -1.0, 1.0, -1.0)])
    assert conflict_rate(opposed, "spectral") == 8 / 12


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_one_task_is_in_no_conflict(geometry):
    assert conflict_rate(gaussian(1, 3, 4), geometry) == 0.0
    assert_close(cosine_matrix(gaussian(1, 3, 4), geometry), [[1.0]])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_task_without_gradient_is_in_conflict_with_nobody(geometry):
    gradients = torch.stack([torch.eye(3), torch.zeros(3, 3), -torch.eye(3)])
    assert_close(cosine_matrix(gradients, geometry), [[1, 0, -1], [0, 0, 0], [-1, 0, 1]])
    assert conflict_rate(gradients, geometry) == 2 / 6
    assert conflict_rate(torch.zeros(3, 2, 2), geometry) == 0.0


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rounding_is_no_conflict(geometry):
    turned = orthogonal(4, 1) @ diagonals((1.0, 2.0, 0.0, 0.0), (0.0, 0.0, 3.0, 1.0)) @ orthogonal(4, 2)
    assert conflict_rate(turned, geometry) == 0
    assert conflict_rate(-turned, geometry) == 0


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosines_are_computed_in_double_precision_without_a_graph(geometry, dtype):
    gradients = gaussian(3, 4, 5).to(dtype).requires_grad_()
    cosines = cosine_matrix(gradients, geometry)
    assert cosines.dtype == torch.float64
    assert not cosines.requires_grad
    assert_close(cosines, cosine_matrix(gradients.detach().double(), geometry))


def test_gradients_are_left_alone():
    gradients = gaussian(3, 4, 5)
    before = gradients.clone()
    for geometry in GEOMETRIES:
        cosine_matrix(gradients, geometry)
    assert torch.equal(gradients, before)


# Against numpy, and under maps that must not matter


@few
@given(several_blocks())
def test_spectral_cosines_are_those_of_numpy(drawn):
    blocks, scale = drawn
    assert_close(cosine_matrix(blocks, "spectral", scale), spectral_in_numpy(blocks, scale), 1e-10)


@few
@given(several_blocks())
def test_euclidean_cosines_are_those_of_numpy(drawn):
    blocks, _ = drawn
    flat = np.concatenate([block.flatten(1).numpy() for block in blocks], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    assert_close(cosine_matrix(blocks), flat @ flat.T / np.maximum(np.outer(norms, norms), 1e-300))


@few
@given(several_blocks(), geometries)
def test_cosines_lie_between_minus_one_and_one_and_are_one_for_the_same_task(drawn, geometry):
    blocks, scale = drawn
    cosines = cosine_matrix(blocks, geometry, scale)
    assert cosines.abs().max() <= 1
    present = torch.stack([block.abs().amax((1, 2)) for block in blocks]).amax(0) > 0
    assert_close(cosines.diagonal(), present.double())
    assert 0 <= conflict_rate(blocks, geometry, scale) <= 1


@few
@given(several_blocks(), geometries, st.integers(-300, 300))
def test_the_size_of_a_task_does_not_matter(drawn, geometry, exponent):
    blocks, scale = drawn
    sizes = torch.ones(len(blocks[0]), 1, 1, dtype=torch.float64)
    sizes[0] = 10.0**exponent
    scaled = [block * sizes for block in blocks]
    if all(block.isfinite().all() for block in scaled):
        assert_close(cosine_matrix(scaled, geometry, scale), cosine_matrix(blocks, geometry, scale), 1e-8)


@few
@given(several_blocks(), geometries, st.integers(0, 2**31))
def test_orthogonal_maps_do_not_matter(drawn, geometry, seed):
    blocks, scale = drawn
    turned = [orthogonal(block.shape[1], seed) @ block @ orthogonal(block.shape[2], seed + 1) for block in blocks]
    assert_close(cosine_matrix(turned, geometry, scale), cosine_matrix(blocks, geometry, scale), 1e-10)


@few
@given(several_blocks(), geometries)
def test_transposing_does_not_matter(drawn, geometry):
    blocks, scale = drawn
    assert_close(cosine_matrix([b.mT for b in blocks], geometry, scale), cosine_matrix(blocks, geometry, scale), 1e-10)


@few
@given(several_blocks())
def test_geometries_agree_on_rows(drawn):
    """The spectral and the Frobenius norm of a matrix with one row are the same."""
    rows = drawn[0][0][:, :1]
    assert_close(cosine_matrix(rows, "spectral"), cosine_matrix(rows), 1e-10)


# What bad input gets


@pytest.mark.parametrize("ask", [cosine_matrix, conflict_rate])
def test_an_unknown_geometry_names_the_nearest(ask):
    expected = r"^Unknown geometry 'spektral': expected one of euclidean, spectral\. Did you mean 'spectral'\?$"
    with pytest.raises(ValueError, match=expected):
        ask(torch.eye(2)[None], "spektral")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_that_do_not_fit_are_refused(geometry):
    with pytest.raises(ValueError, match="same tasks"):
        cosine_matrix([gaussian(2, 3, 3), gaussian(3, 3, 3)], geometry)
    with pytest.raises(ValueError, match="one number per block"):
        cosine_matrix(gaussian(2, 3, 3), geometry, scale=[1.0, 2.0])
