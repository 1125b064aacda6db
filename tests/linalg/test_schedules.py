"""Newton-Schulz coefficients against the published ones, and against Chebyshev's equioscillation."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from moonopt.linalg.schedules import SCHEDULES, Triple, polar_express, schedule

# modded-nanogpt, dion and nanochat: safety 1.02, cushion 0.02.
PUBLISHED_FIVE = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Amsel et al., Polar Express: without a safety factor.
PUBLISHED_CUSHION = 0.02407327424182761
PUBLISHED_EIGHT = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# The default of the authors' repository: safety 1.01, cushion 0.02; the first seven of a longer sequence.
AUTHORS_FIRST_SEVEN = (
    (8.23731249, -23.15774741, 16.68056841),
    (4.082441999, -2.893047735, 0.5252849257),
    (3.926347992, -2.854746803, 0.5318022423),
    (3.298218713, -2.424541981, 0.4863200836),
    (2.297036943, -1.636625581, 0.4002628456),
    (1.876380535, -1.234789658, 0.358918875),
    (1.856442349, -1.213244988, 0.3568003488),
)
LOWER_BOUNDS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99)


def assert_steps_close(found: tuple[Triple, ...], expected: tuple[Triple, ...], tolerance: float) -> None:
    assert len(found) == len(expected)
    for triple, published in zip(found, expected, strict=True):
        assert triple == pytest.approx(published, abs=tolerance, rel=0)


def evaluate(triple: Triple, x: float) -> float:
    a, b, c = triple
    return a * x + b * x**3 + c * x**5


def composed(triples: tuple[Triple, ...], x: Tensor) -> Tensor:
    for a, b, c in triples:
        x = a * x + b * x**3 + c * x**5
    return x


def between(lower: float, upper: float = 1.0) -> Tensor:
    return torch.logspace(math.log10(lower), math.log10(upper), 5001, dtype=torch.float64)


def worst_error(steps: int, lower: float) -> float:
    triples = polar_express(steps, lower=lower, safety=1.0, cushion=0.0)
    return (1 - composed(triples, between(lower))).abs().max().item()


def interior_extrema(triple: Triple) -> list[float]:
    a, b, c = triple
    root = math.sqrt(9 * b * b - 20 * a * c)
    return [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]


def test_generated_five_steps_are_the_published_ones():
    assert_steps_close(polar_express(5), PUBLISHED_FIVE, 1e-8)


def test_generated_eight_steps_without_safety_are_the_published_ones():
    assert_steps_close(polar_express(8, safety=1.0, cushion=PUBLISHED_CUSHION), PUBLISHED_EIGHT, 1e-8)


def test_generated_steps_at_the_authors_default_are_the_published_ones():
    assert_steps_close(polar_express(10, safety=1.01)[:7], AUTHORS_FIRST_SEVEN, 1e-8)


# From the eighth on the interval is so narrow that the coefficients are ill-conditioned: their value at 1 is not.
@pytest.mark.parametrize(
    ("steps", "safety", "last", "tolerance"),
    [
        (6, 1.02, ((2.300530712, -1.611166556, 0.3833374428), (1.900383476, -1.277923719, 0.3778031534)), 1e-8),
        (7, 1.02, ((1.863121055, -1.204216062, 0.3421879561), (1.87502236, -1.250024844, 0.3750024844)), 1e-8),
        (8, 1.02, ((1.838257215, -1.177926329, 0.3396513039), (1.875, -1.25, 0.375)), 1e-7),
        (5, 1.01, ((2.320007313, -1.686216973, 0.4206802734),), 1e-8),
        (6, 1.01, ((1.89514434, -1.272205019, 0.3772273448),), 1e-8),
        (7, 1.01, ((1.875006772, -1.250007524, 0.3750007525),), 1e-8),
        (8, 1.01, ((1.874997, -1.249994, 0.374997),), 2e-5),
    ],
)
def test_last_steps_depend_on_the_number_of_steps_as_published(steps, safety, last, tolerance):
    assert_steps_close(polar_express(steps, safety=safety)[-len(last) :], last, tolerance)


@pytest.mark.parametrize("safety", [1.0, 1.01, 1.02, 1.05])
def test_last_step_alone_has_no_safety_factor(safety):
    *_, fourth_of_five, _ = polar_express(5, safety=safety)
    *_, fourth_of_four = polar_express(4, safety=safety)
    expected = tuple(x / safety**power for x, power in zip(fourth_of_four, (1, 3, 5), strict=True))
    assert fourth_of_five == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("lower", LOWER_BOUNDS)
def test_every_generated_polynomial_equioscillates(lower):
    low, high = lower, 1.0
    checked = 0
    for triple in polar_express(15, lower=lower, safety=1.0, cushion=0.0):
        level = 1 - evaluate(triple, low)
        if level < 1e-9:  # below, the errors are the rounding of the evaluation
            break
        points = [low, *interior_extrema(triple), high]
        errors = [1 - evaluate(triple, x) for x in points]
        assert points == sorted(points)
        assert errors == pytest.approx([level, -level, level, -level], abs=1e-13, rel=1e-9)
        on_grid = (1 - composed((triple,), between(low, high))).abs().max().item()
        assert on_grid == pytest.approx(level, rel=1e-6)
        low, high = evaluate(triple, low), 1 + level
        checked += 1
    assert checked >= 1


@pytest.mark.parametrize("lower", [0.3, 1e-2, 1e-3, 1e-4, 1e-5])
def test_worst_error_decreases_with_the_number_of_steps(lower):
    errors = [worst_error(steps, lower) for steps in range(1, 13)]
    for error, next_error in itertools.pairwise(errors):
        assert next_error < error or next_error < 1e-14
    assert errors[-1] < 1e-13


# 'Exact greedy optimum' of the reference, which gives two digits.
@pytest.mark.parametrize(
    ("lower", "steps", "error"),
    [
        (1e-2, 4, 1.3e-2),
        (1e-2, 5, 1.2e-6),
        (1e-3, 5, 0.113),
        (1e-3, 6, 9.2e-4),
        (1e-3, 7, 4.8e-10),
        (1e-4, 6, 0.353),
        (1e-4, 7, 2.9e-2),
        (1e-4, 8, 1.5e-5),
        (1e-5, 8, 0.174),
        (1e-5, 9, 3.3e-3),
        (1e-5, 10, 2.3e-8),
    ],
)
def test_worst_error_is_that_of_the_greedy_optimum(lower, steps, error):
    assert worst_error(steps, lower) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("safety", [1.0, 1.01, 1.02, 1.05])
@pytest.mark.parametrize("cushion", [0.0, 0.02, 0.1])
def test_generator_gives_bounded_steps_for_every_setting(safety, cushion):
    for lower in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.6, 0.9):
        for steps in range(1, 16):
            triples = polar_express(steps, lower=lower, safety=safety, cushion=cushion)
            assert len(triples) == steps
            assert all(math.isfinite(x) for triple in triples for x in triple)
            image = composed(triples, between(lower / safety, 1 / safety) if steps > 1 else between(lower))
            assert image.min().item() > 0
            assert image.max().item() < 2


@pytest.mark.parametrize("safety", [1.01, 1.02, 1.05])
def test_many_steps_converge_for_every_safety_factor(safety):
    image = composed(polar_express(15, safety=safety), between(1e-3 / safety, 1 / safety))
    assert (1 - image).abs().max().item() < 1e-10


@pytest.mark.parametrize(
    ("narrowest", "widest"),
    [
        (1e-9, 5e-6),
        (5e-6, 8e-6),
        (8e-6, 0.1),
    ],
)
def test_generator_fits_narrow_intervals(narrowest, widest):
    for width in torch.logspace(math.log10(narrowest), math.log10(widest), 500, dtype=torch.float64).tolist():
        image = composed(polar_express(1, lower=1 - width, safety=1.0, cushion=0.0), between(1 - width))
        # The best odd quintic is wrong by width^3 / 12.8 on so narrow an interval, to leading order.
        assert (1 - image).abs().max().item() <= 0.1 * width**3 + 1e-14


def test_named_schedules_have_the_published_coefficients():
    assert schedule("muon", 3).coefficients == ((3.4445, -4.7750, 2.0315),) * 3
    assert schedule("classical", 2).coefficients == ((1.875, -1.25, 0.375),) * 2
    assert schedule("cubic", 4).coefficients == ((1.5, -0.5, 0.0),) * 4
    assert schedule("none", 5).coefficients == ()
    assert schedule("you", 5).coefficients == (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )
    assert_steps_close(schedule("polar_express", 5).coefficients, PUBLISHED_FIVE, 1e-8)


def test_you_with_fewer_steps_takes_the_first_ones():
    assert schedule("you", 2).coefficients == ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377))


def test_schedules_know_their_name_norm_and_safety():
    found = {name: schedule(name, 5) for name in SCHEDULES}
    assert {name: s.name for name, s in found.items()} == {name: name for name in SCHEDULES}
    assert {name for name, s in found.items() if s.norm == "frobenius"} == {"muon", "none"}
    assert {name: s.safety for name, s in found.items() if s.safety != 1} == {"polar_express": 1.02}


def test_a_single_polar_express_step_has_no_safety_factor():
    single = schedule("polar_express", 1)
    assert single.safety == 1
    # Published first step at safety 1.02, with the factor taken out again.
    expected = [x * 1.02**power for x, power in zip(PUBLISHED_FIVE[0], (1, 3, 5), strict=True)]
    assert single.coefficients[0] == pytest.approx(expected, abs=1e-8)


# The bands of the reference; polar_express is given what is left after division by its safety factor.
@pytest.mark.parametrize(
    ("name", "steps", "lower", "band"),
    [
        ("muon", 5, 1e-2, (0.6818, 1.1344)),
        ("muon", 5, 1e-3, (0.4705, 1.2024)),
        ("you", 5, 1e-2, (0.978, 1.032)),
    ],
)
def test_singular_values_land_in_the_published_band(name, steps, lower, band):
    image = composed(schedule(name, steps).coefficients, between(lower))
    assert (image.min().item(), image.max().item()) == pytest.approx(band, abs=5e-4)


@pytest.mark.parametrize(("name", "slope"), [("muon", 484.9), ("you", 492.7)])
def test_slope_at_zero_is_the_published_one(name, slope):
    assert math.prod(a for a, _, _ in schedule(name, 5).coefficients) == pytest.approx(slope, abs=0.05)


def test_unknown_schedule_names_the_nearest():
    with pytest.raises(ValueError, match=r"^Unknown schedule 'polar_expres': ") as error:
        schedule("polar_expres", 5)
    assert str(error.value) == (
        "Unknown schedule 'polar_expres': expected one of polar_express, you, muon, classical, cubic, none. "
        "Did you mean 'polar_express'?"
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [0, -1, 2.5, "5", None])
def test_steps_that_are_no_positive_integer_are_refused(name, steps):
    with pytest.raises(ValueError, match=rf"^steps must be a positive integer, found {steps!r}\.$"):
        schedule(name, steps)


def test_you_with_six_steps_is_refused():
    with pytest.raises(ValueError, match=r"^Schedule 'you' has 5 steps, found steps=6: use 'polar_express'\.$"):
        schedule("you", 6)
