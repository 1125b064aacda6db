"""Gradient-based balancers: their conditions, TorchJD where it solves the same problem, engines, invariances."""

import weakref

import pytest
import torch
from torch import nn

from moonopt.balance.balanced import Balanced
from moonopt.balance.base import Tasks
from moonopt.balance.cagrad import CAGrad
from moonopt.balance.delivery import delivered
from moonopt.balance.graddrop import GradDrop
from moonopt.balance.imtl import IMTLG
from moonopt.balance.linear import LS
from moonopt.balance.mgda import MGDA
from moonopt.balance.nash import NashMTL
from moonopt.balance.pcgrad import PCGrad
from moonopt.balance.torchjd import FromTorchJD
from moonopt.methods import BALANCERS, build

GOLDEN = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]], dtype=torch.float64)
DETERMINISTIC = {"mgda": MGDA, "cagrad": CAGrad, "imtl-g": IMTLG, "nash-mtl": NashMTL}


def jacobian(tasks, columns=30, spread=1.0, rank=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rank = columns if rank is None else rank
    rows = torch.randn(tasks, rank, dtype=torch.float64, generator=generator)
    rows = rows @ torch.randn(rank, columns, dtype=torch.float64, generator=generator)
    return rows * torch.logspace(0, torch.tensor(spread).log10().item(), tasks, dtype=torch.float64)[:, None]


def combined(balancer, rows, heads=False, **options):
    """The gradient of the combined loss of linear losses whose gradients are the rows; with heads, theirs too."""
    theta = nn.Parameter(torch.zeros(rows.shape[1], dtype=rows.dtype))
    own = [nn.Parameter(torch.zeros((), dtype=rows.dtype)) for _ in rows] if heads else []
    optimizer = Balanced(balancer, torch.optim.SGD([theta, *own], lr=0.1), **options)
    losses = lambda: [row @ theta + 1 + (own[i] if heads else 0) for i, row in enumerate(rows)]  # noqa: E731
    optimizer.combine(losses).backward()
    gradient = theta.grad
    return (gradient, torch.stack([p.grad for p in own])) if heads else gradient


def test_golden_values():
    """Of TorchJD's table, where its convention is ours."""
    expected = {
        MGDA(2): (0.0, 1.0, 1.0),
        IMTLG(2): (0.0767, 1.0, 1.0),
        PCGrad(2): (0.5848, 3.8012, 3.8012),
        CAGrad(2, c=0.5, rescale=False): (0.1835, 1.2041, 1.2041),
    }
    for balancer, gradient in expected.items():
        assert combined(balancer, GOLDEN).tolist() == pytest.approx(gradient, abs=6e-5)


@pytest.mark.parametrize("spread", [1.0, 1e4])
@pytest.mark.parametrize("tasks", [2, 3, 11, 40])
def test_mgda_and_nash_meet_their_conditions(tasks, spread):
    rows = jacobian(tasks, 60, spread)
    gradient = combined(MGDA(tasks), rows)
    assert (rows @ gradient).min() >= gradient @ gradient - 1e-10 * rows.square().sum()
    optimizer, weights = _weights(NashMTL(tasks), rows)
    assert weights * (rows @ (weights @ rows)) == pytest.approx(torch.ones(tasks, dtype=torch.float64), rel=1e-8)
    assert optimizer.memory["unsolved"] == 0


def _weights(balancer, rows):
    theta = nn.Parameter(torch.zeros(rows.shape[1], dtype=rows.dtype))
    optimizer = Balanced(balancer, torch.optim.SGD([theta], lr=0.1))
    optimizer.combine(lambda: [row @ theta for row in rows])
    return optimizer, optimizer.task_weights.double()


def test_imtl_g_has_equal_projections():
    rows = jacobian(5, 30, 100.0)
    gradient = combined(IMTLG(5), rows)
    projections = rows @ gradient / rows.norm(dim=1)
    assert projections.tolist() == pytest.approx([projections.mean().item()] * 5, rel=1e-4)


@pytest.mark.parametrize("spread", [1.0, 1e2])
@pytest.mark.parametrize("tasks", [2, 3, 11])
def test_torchjd_agrees_where_it_solves_the_same_problem(tasks, spread):
    aggregation = pytest.importorskip("torchjd.aggregation")
    rows = jacobian(tasks, 40, spread)
    pairs = [(IMTLG(tasks), "IMTLG", {}), (CAGrad(tasks, c=0.4, rescale=False), "CAGrad", {"c": 0.4})]
    for balancer, name, settings in pairs:
        try:
            theirs = getattr(aggregation, name)(**settings)(rows)
        except ImportError:
            continue
        assert torch.allclose(combined(balancer, rows), theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_where_torchjd_does_not_converge():
    """MGDA's Frank-Wolfe stops at steps of 1e-3, and Nash-MTL's convex solver fails from norm spreads of 1e3 on."""
    aggregation = pytest.importorskip("torchjd.aggregation")
    rows = jacobian(11, 40)
    found = (aggregation.MGDA()(rows), combined(MGDA(11), rows))
    theirs, ours = (float((each @ each - (rows @ each).min()) / rows.square().sum()) for each in found)
    assert ours < 1e-10 < 1e-6 < theirs

    pytest.importorskip("ecos")
    rows = jacobian(3, 40, 1e4)
    nash = aggregation.NashMTL(n_tasks=3, max_norm=0.0)
    direction = nash(rows)
    weights = torch.linalg.lstsq(rows.T, direction[:, None]).solution[:, 0]
    residual = float((weights * (rows @ direction) - 1).abs().max())
    ours = _weights(NashMTL(3), rows)[1]
    assert float((ours * (rows @ (ours @ rows)) - 1).abs().max()) < 1e-8
    assert residual > 0.9  # 1 is what weights of zero have


def test_pcgrad_and_graddrop_agree_with_torchjd_under_the_same_random_numbers(monkeypatch):
    aggregation = pytest.importorskip("torchjd.aggregation")
    rows = jacobian(6, 40)
    torch.manual_seed(3)
    theirs = aggregation.PCGrad()(rows)

    def their_orders(count, generator):
        torch.manual_seed(3)
        return torch.stack([order[order != i] for i, order in enumerate(torch.randperm(count) for _ in range(count))])

    monkeypatch.setattr("moonopt.balance.pcgrad.random_orders", their_orders)
    assert torch.allclose(combined(PCGrad(6), rows), theirs, atol=1e-5)

    torch.manual_seed(4)
    theirs = aggregation.GradDrop()(rows)
    monkeypatch.setattr("moonopt.balance.chance.generator", lambda memory, device="cpu": torch.Generator().manual_seed(4))
    assert torch.allclose(combined(GradDrop(6), rows), theirs, atol=1e-6)


@pytest.mark.parametrize("name", ["UPGrad", "Mean", "MGDA", "AlignedMTL", "ConFIG", "TrimmedMean", "MGDAWeighting"])
def test_any_torchjd_aggregator_or_weighting_is_a_balancer(name):
    aggregation = pytest.importorskip("torchjd.aggregation")
    settings = {"trim_number": 1} if name == "TrimmedMean" else {}
    try:
        method = getattr(aggregation, name)(**settings)
    except ImportError as error:
        pytest.skip(str(error))
    rows = jacobian(4, 20).float()
    expected = method(rows) if not name.endswith("Weighting") else method(rows @ rows.T) @ rows
    shared, heads = combined(FromTorchJD(4, method), rows, heads=True)
    assert torch.allclose(shared, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(heads, torch.ones(4))


def test_minimize_takes_the_direction_of_a_torchjd_aggregator():
    aggregation = pytest.importorskip("torchjd.aggregation")
    rows, theta = jacobian(4, 20).float(), torch.nn.Parameter(torch.zeros(20))
    optimizer = Balanced(FromTorchJD(4, aggregation.MGDA()), torch.optim.SGD([theta], lr=1.0))
    optimizer.minimize(lambda: (rows @ theta).unbind())
    assert torch.allclose(-theta, aggregation.MGDA()(rows), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name, each in BALANCERS.items() if each.uses_gram])
def test_engines_agree(name):
    """On a net with dropout, batch norm and heads, whose buffers move once per step whatever the engine."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh()
            )
            self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(5))

        def losses(self, x, y):
            hidden = self.trunk(x)
            return [(head(hidden)[:, 0] - y[:, i]).square().mean() for i, head in enumerate(self.heads)]

    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(16, 6, dtype=torch.float64, generator=generator),
        torch.randn(16, 5, dtype=torch.float64, generator=generator),
    )
    found = []
    for engine in ("stored", "stored:batched", "stored:anew", "columns", "blocked:2", "blocked:9"):
        torch.manual_seed(0)
        model = Net().double()
        optimizer = build(name, model, 5, engine=engine)
        for _ in range(4):
            optimizer.minimize(model.losses, x, y)
        found.append(torch.cat([t.detach().double().flatten() for t in model.state_dict().values()]))
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-6)


@pytest.mark.parametrize("name", ["pcgrad", "cagrad", "graddrop"])
def test_heads_get_the_plain_gradient(name):
    rows = jacobian(3, 10)
    _, heads = combined(BALANCERS[name](3), rows, heads=True)
    assert heads.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_heads_see_the_weight_or_not_as_the_method_says(name):
    rows = jacobian(3, 10)
    balancer = DETERMINISTIC[name](3)
    theirs = combined(DETERMINISTIC[name](3), rows, heads=True)[1]
    _, weights = _weights(DETERMINISTIC[name](3), rows)
    expected = [1.0] * 3 if balancer.heads == "plain" else weights.tolist()
    assert theirs.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_order_of_the_tasks_does_not_matter(name):
    rows = jacobian(5, 20, 10.0)
    order = torch.tensor([3, 0, 4, 1, 2])
    one, other = combined(DETERMINISTIC[name](5), rows), combined(DETERMINISTIC[name](5), rows[order])
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


def test_scaling_the_losses():
    """Nash-MTL's update does not change, IMTL-G's not in its direction; MGDA's and CAGrad's do."""
    rows = jacobian(4, 20)
    scales = torch.tensor([1.0, 10.0, 0.1, 3.0], dtype=torch.float64)[:, None]

    def changed(balancer):
        one, other = combined(balancer(4), rows), combined(balancer(4), scales * rows)
        cosine = float(one @ other / one.norm() / other.norm())
        return float((one - other).norm() / one.norm()), cosine

    assert changed(NashMTL)[0] < 1e-5
    assert changed(IMTLG)[1] == pytest.approx(1, abs=1e-6)
    for balancer in (MGDA, CAGrad, LS):
        difference, cosine = changed(balancer)
        assert difference > 0.1
        assert cosine < 0.999


def test_conventions():
    rows = jacobian(3, 10)
    assert torch.allclose(combined(MGDA(3, times_tasks=True), rows), 3 * combined(MGDA(3), rows))
    assert torch.allclose(combined(CAGrad(3, rescale=False), rows), 1.16 * combined(CAGrad(3), rows), rtol=1e-5)
    assert torch.allclose(combined(CAGrad(3, times_tasks=True), rows), 3 * combined(CAGrad(3), rows), rtol=1e-5)
    assert torch.allclose(combined(PCGrad(3, reduction="mean"), rows), combined(PCGrad(3), rows) / 3, rtol=1e-5)
    normal = combined(MGDA(3, normalisation="l2"), rows * torch.tensor([[1.0], [50.0], [0.01]]))
    weights = _weights(MGDA(3), rows / rows.norm(dim=1, keepdim=True))[1]
    assert torch.allclose(normal, weights @ (rows * torch.tensor([[1.0], [50.0], [0.01]])), rtol=1e-4)


def test_nash_keeps_its_weights_where_there_is_no_solution():
    rows = jacobian(3, 10)
    theta = nn.Parameter(torch.zeros(10, dtype=torch.float64))
    optimizer = Balanced(NashMTL(3), torch.optim.SGD([theta], lr=0.0))
    optimizer.minimize(lambda: [row @ theta for row in rows])
    before = optimizer.task_weights.clone()
    optimizer.minimize(lambda: [rows[0] @ theta, -(rows[0] @ theta), rows[1] @ theta])
    optimizer.minimize(lambda: [rows[0] @ theta, 0 * theta.sum(), rows[1] @ theta])
    assert torch.equal(optimizer.task_weights, before)
    assert optimizer.memory["unsolved"] == 2


def test_clipping_is_of_the_shared_parameters():
    rows = 100 * jacobian(3, 10)
    theta = nn.Parameter(torch.zeros(10, dtype=torch.float64))
    own = [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in rows]
    optimizer = Balanced(NashMTL(3, max_norm=1e-3), torch.optim.SGD([theta, *own], lr=1.0))
    optimizer.minimize(lambda: [row @ theta + 5 * own[i] for i, row in enumerate(rows)])
    assert theta.detach().norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert min(abs(p.item()) for p in own) > 1e-3


def test_every_so_many_steps():
    rows = jacobian(3, 10)
    theta = nn.Parameter(torch.ones(10, dtype=torch.float64))
    optimizer = Balanced(MGDA(3), torch.optim.SGD([theta], lr=0.01), every=3)
    seen = []
    for step in range(6):
        optimizer.minimize(lambda s=step: [(row @ theta).square() * (1 + s * i) for i, row in enumerate(rows)])
        seen.append(tuple(optimizer.task_weights.tolist()))
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5]
    with pytest.raises(ValueError, match="every must be"):
        Balanced(GradDrop(3), torch.optim.SGD([theta], lr=0.01), every=2)


@pytest.mark.parametrize("engine", ["stored", "stored:batched"])
def test_shared_parameters_can_be_chosen(engine):
    rows = jacobian(2, 6)
    first, second = (nn.Parameter(torch.zeros(6, dtype=torch.float64)) for _ in range(2))

    def weights(shared):
        optimizer = Balanced(MGDA(2), torch.optim.SGD([first, second], lr=0.1), shared=shared, engine=engine)
        optimizer.combine(lambda: [rows[0] @ first + rows[1] @ second, rows[1] @ first + 5 * rows[0] @ second])
        return optimizer.task_weights

    assert not torch.allclose(weights([first]), weights(None))
    assert torch.allclose(weights([first, second]), weights(None))


@pytest.mark.parametrize("engine", ["columns", "stored:anew"])
def test_engines_that_evaluate_again_need_a_closure(engine):
    theta = nn.Parameter(torch.zeros(3))
    optimizer = Balanced(MGDA(2), torch.optim.SGD([theta], lr=0.1), engine=engine)
    with pytest.raises(ValueError, match=f'engine="{engine}" evaluates the losses again: pass a closure'):
        optimizer.combine([theta.sum(), theta.square().sum()])


@pytest.mark.parametrize("engine", ["columns", "stored:anew"])
def test_losses_that_wait_may_have_saved_buffers(engine):
    """Batch norm saves its running statistics for the backward pass, and evaluations in between restore them."""
    found = {}
    for each in ("stored", engine):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(), torch.randn(6, 4).double()
        optimizer = Balanced(MGDA(3), torch.optim.SGD(model.parameters(), lr=0.1), module=model, engine=each)
        losses = lambda model=model, x=x: list(model(x).square().mean(0))  # noqa: E731
        optimizer.combine(losses(), again=losses).backward()
        optimizer.step()
        found[each] = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    torch.testing.assert_close(found[engine], found["stored"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["columns", "stored:anew"])
@pytest.mark.parametrize("counts", [(3, 2), (2, 3), (3, 3, 3, 2)])
def test_a_closure_with_other_tasks_when_it_is_evaluated_again_is_told(engine, counts):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    evaluations = iter([*counts, *[counts[-1]] * 9])

    def losses():
        values = model(x).square().mean(0)
        return {f"{number}": values[number] for number in range(next(evaluations))}

    with pytest.raises(ValueError, match=r"Evaluated again, the closure returned the losses of .*, expected those of 0, 1"):
        build("mgda", model, 3, engine=engine).minimize(losses)


def test_no_graph_waits_while_gradients_are_computed_anew():
    """What an evaluation saves is gone when the next one begins: there is one for each task, and one for their sum."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 4)
    saved, waiting = [], []

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor
            saved.append(weakref.ref(self))

    def losses():
        waiting.append((len(saved), sum(each() is not None for each in saved)))
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            return list(model(x).square().mean(0))

    build("mgda", model, 3, engine="stored:anew").minimize(losses)
    assert [left for _, left in waiting] == [0, 0, 0, 0]
    assert waiting[-1][0] > 3


def test_unknown_settings_and_strangers_among_the_shared_parameters_are_named():
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"Unknown setting of famo 'gama'.*Did you mean 'gamma'"):
        build("famo", model, 3, balancer={"gama": 1})
    with pytest.raises(ValueError, match="Unknown option of Balanced 'engin'"):
        build("mgda", model, 3, engin="columns")
    with pytest.raises(ValueError, match="Unknown reduction 'men'"):
        PCGrad(3, reduction="men")
    with pytest.raises(ValueError, match="shared must be parameters of the optimizer, found 1 that it does not train"):
        build("mgda", model, 3, shared=[nn.Parameter(torch.zeros(3))])


GRADIENT_BASED = [name for name, each in BALANCERS.items() if each.needs_gradients]


@pytest.mark.parametrize("name", GRADIENT_BASED)
def test_heads_that_start_at_zero_are_trained(name, two_heads, batch):
    x, y = batch(tasks=3)
    model = two_heads(3)
    for head in model.heads:
        nn.init.zeros_(head.weight)
    optimizer = build(name, model, 3, shared=model.trunk.parameters())
    for _ in range(3):
        optimizer.minimize(lambda: list(model.losses(x, y)))
    assert all(head.weight.abs().max() > 0 for head in model.heads)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("name", ["ls", *GRADIENT_BASED])
def test_a_gradient_that_is_not_finite_leaves_the_parameters(name, nonfinite, two_heads, batch):
    """Though all losses are."""
    x, y = batch(tasks=3)
    model = two_heads(3)
    optimizer = build(name, model, 3, nonfinite=nonfinite)
    before = [p.detach().clone() for p in model.parameters()]

    def losses():
        first, *others = model.losses(x, y)
        return [first + (0 * model.trunk[0].weight).abs().sum().sqrt(), *others]

    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="At step 1"):
            optimizer.minimize(losses)
    else:
        optimizer.minimize(losses)
        assert optimizer.diagnostics()["skipped_steps"] == 1
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("engine", ["stored", "stored:batched", "stored:anew", "columns", "blocked:2"])
def test_the_task_whose_gradient_is_not_finite_is_named(engine, two_heads, batch):
    (x, y), model = batch(tasks=3), two_heads(3)
    optimizer = build("mgda", model, ["a", "b", "c"], engine=engine)

    def losses():
        first, second, third = ((head(model.trunk(x))[:, 0] - y[:, i]).square().mean() for i, head in enumerate(model.heads))
        return [first, second + (0 * model.trunk[0].weight).abs().sum().sqrt(), third]

    with pytest.raises(FloatingPointError, match="of task 'b'"):
        optimizer.minimize(losses)


def test_a_task_without_a_graph_has_no_gradient_in_one_pass_either(two_heads, batch):
    (x, y), found = batch(tasks=3, dtype=torch.float64), []
    for engine in ("stored", "stored:batched"):
        model = two_heads(3, dtype=torch.float64)
        optimizer = build("cagrad", model, 3, engine=engine)
        for _ in range(3):
            optimizer.minimize(lambda m=model: [*m.losses(x, y)[:2], torch.ones((), dtype=torch.float64)])
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)


def test_gradients_of_one_pass_lie_where_kernels_read_and_may_be_changed(batch, two_heads):
    (x, y), model = batch(tasks=3), two_heads(3)
    build("mgda", model, 3, engine="stored:batched").minimize(lambda: list(model.losses(x, y)))
    for p in model.parameters():
        assert p.grad.data_ptr() % 16 == 0
        p.grad.add_(p, alpha=0.1)  # a regularisation by hand


@pytest.mark.parametrize("engine", ["stored", "stored:batched", "stored:anew", "columns", "blocked:2"])
@pytest.mark.parametrize("name", GRADIENT_BASED)
def test_tasks_that_share_nothing(name, engine):
    if name == "gradnorm":
        pytest.skip("it compares gradients in a shared matrix")
    models = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))
    optimizer = build(name, models, 3, engine=engine)
    before = [model.weight.detach().clone() for model in models]
    optimizer.minimize(lambda: [model(torch.ones(2, 3)).square().mean() for model in models])
    assert not any(torch.equal(model.weight, start) for model, start in zip(models, before, strict=True))


@pytest.mark.parametrize("whole_step", [False, True])
@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "stored") for name in ("ls", *GRADIENT_BASED)), ("mgda", "stored:batched")]
)
def test_a_hook_on_a_parameter_acts_once(name, engine, whole_step, two_heads, batch):
    x, y = batch(tasks=3)
    gradients = []
    for factor in (1.0, 0.5):
        model = two_heads(3)
        model.trunk[0].weight.register_hook(lambda g, f=factor: f * g)
        optimizer = build(name, model, 3, balancer={"max_norm": None} if name == "nash-mtl" else {}, engine=engine)
        if whole_step:
            optimizer.minimize(lambda m=model: list(m.losses(x, y)))
        else:
            optimizer.combine(lambda m=model: list(m.losses(x, y))).backward()
        gradients.append(model.trunk[0].weight.grad)
    assert torch.allclose(0.5 * gradients[0], gradients[1], rtol=1e-5)


@pytest.mark.parametrize("name", ["mgda", "nash-mtl", "si", "rlw"])
def test_weights_stay_among_micro_batches_with_other_tasks(name, two_heads, batch):
    x, y = batch(tasks=3)
    model = two_heads(3)
    optimizer = build(name, model, 3)
    optimizer.combine(lambda: {str(i): model.losses(x, y)[i] for i in (0, 2)}).backward()
    first = optimizer.task_weights.clone()
    optimizer.combine(lambda: {str(i): model.losses(x[:5], y[:5])[i] for i in (0, 1)}).backward()
    assert optimizer.task_weights[[0, 2]].tolist() == first[[0, 2]].tolist()
    assert optimizer.task_weights[1] != 0


def test_graddrop_drops_in_the_chosen_parameters_alone(two_heads, batch):
    x, y = batch(tasks=3)
    gradients = []
    for name, options in (("graddrop", True), ("ls", False)):
        model = two_heads(3)
        settings = {"shared": [model.trunk[0].weight]} if options else {"balancer": {"reduction": "sum"}}
        build(name, model, 3, **settings).combine(lambda m=model: list(m.losses(x, y))).backward()
        gradients.append((model.trunk[0].weight.grad, model.trunk[2].weight.grad))
    assert not torch.allclose(gradients[0][0], gradients[1][0])
    assert torch.allclose(gradients[0][1], gradients[1][1], atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", GRADIENT_BASED)
def test_the_order_in_which_a_gradient_lies_in_memory_does_not_matter(name, fused):
    """That of a transposed weight is transposed, which a fused optimizer would not notice."""
    targets = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for turn in (lambda matrix: matrix, lambda matrix: matrix.t().contiguous()):
        weight = nn.Parameter(torch.linspace(-1, 1, 15).reshape(5, 3))
        optimizer = Balanced(BALANCERS[name](2), torch.optim.Adam([weight], lr=0.1, fused=fused))
        for _ in range(3):
            optimizer.minimize(lambda p=weight, turn=turn: [(turn(p) - turn(each)).square().sum() for each in targets])
        assert weight.grad.stride() == weight.stride()
        found.append(weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_minimize_leaves_gradients_in_what_others_train(name, two_heads, batch):
    x, y = batch(tasks=3)
    gradients = []
    for whole_step in (False, True):
        model = two_heads(3)
        optimizer = Balanced(DETERMINISTIC[name](3), torch.optim.SGD(model.trunk.parameters(), lr=0.1))
        if whole_step:
            optimizer.minimize(lambda m=model: list(m.losses(x, y)))
        else:
            optimizer.combine(lambda m=model: list(m.losses(x, y))).backward()
        gradients.append(model.heads[0].weight.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)


def own_heads(model, x, y):
    """The losses, of which each depends on the head of its task alone."""
    hidden = model.trunk(x)
    return [(head(hidden)[:, 0] - target).square().mean() for head, target in zip(model.heads, y.mT, strict=True)]


@pytest.mark.parametrize("verb", ["minimize", "combine"])
@pytest.mark.parametrize("trained", ["trunk", "trunk and two heads"])
@pytest.mark.parametrize("balancer", [PCGrad, CAGrad, GradDrop, FromTorchJD])
def test_heads_that_others_train_get_the_plain_gradients_of_their_tasks(balancer, trained, verb, two_heads, batch):
    model, (x, y) = two_heads(3), batch(tasks=3)
    inside = [*model.trunk.parameters(), *(model.heads[:2].parameters() if trained != "trunk" else ())]
    more = [pytest.importorskip("torchjd.aggregation").MGDA()] if balancer is FromTorchJD else []
    optimizer = Balanced(balancer(3, *more), torch.optim.SGD(inside, lr=0.1))
    expected = torch.autograd.grad(sum(own_heads(model, x, y)), list(model.heads.parameters()))
    if verb == "minimize":
        optimizer.minimize(own_heads, model, x, y)
    else:
        optimizer.combine(own_heads, model, x, y).backward()
    torch.testing.assert_close([p.grad for p in model.heads.parameters()], list(expected))


def test_what_tasks_share_and_others_train_gets_the_weighted_gradient(two_heads, batch):
    model, (x, y) = two_heads(3), batch(tasks=3)
    first, rest = model.trunk[0], [*model.trunk[2].parameters(), *model.heads.parameters()]
    optimizer = Balanced(CAGrad(3), torch.optim.SGD(rest, lr=0.1))
    optimizer.combine(own_heads, model, x, y).backward()
    total = (optimizer.task_weights * torch.stack(own_heads(model, x, y))).sum()
    torch.testing.assert_close(first.weight.grad, torch.autograd.grad(total, first.weight)[0])


def test_the_graph_is_gone_when_minimize_steps(two_heads, batch):
    graphs = weakref.WeakSet()

    class Noticed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, losses):
            graphs.add(ctx)
            return losses.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    model, data, there = two_heads(3), batch(tasks=3), []
    optimizer = build("mgda", model, 3)
    optimizer.register_step_pre_hook(lambda *_: there.append(len(graphs)))
    optimizer.minimize(lambda *given: Noticed.apply(model.losses(*given)), *data)
    assert there == [0]


@pytest.mark.parametrize("name", ["mgda", "pcgrad", "nash-mtl"])
def test_the_task_gradients_are_gone_when_minimize_steps(name, two_heads, batch, monkeypatch):
    kept, there = [], []
    seen = Tasks.seen

    def noticed(self):
        found = seen(self)
        kept.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Tasks, "seen", noticed)
    model = two_heads(3)
    optimizer = build(name, model, 3)
    optimizer.register_step_pre_hook(lambda *_: there.append(kept[-1]() is not None))
    optimizer.minimize(model.losses, *batch(tasks=3))
    assert there == [False]


def test_a_direction_is_gone_after_its_backward_pass():
    theta = nn.Parameter(torch.zeros(3))
    loss = delivered({theta: torch.ones(3)}, torch.tensor(2.0))
    (3 * loss).backward()
    assert theta.grad.tolist() == [3, 3, 3]
    assert loss.item() == 2
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_balancer_may_use_inner_products_and_evaluate_again(two_heads, batch):
    class Both(MGDA):
        evaluates_again = True

        def learn(self, learned, memory):
            assert learned.after.sum() < learned.before.sum()

    x, y = batch(tasks=3)
    model = two_heads(3)
    optimizer = Balanced(Both(3), torch.optim.SGD(model.parameters(), lr=0.1), module=model)
    optimizer.minimize(lambda: list(model.losses(x, y)))
    assert optimizer.diagnostics()["step"] == 1


@pytest.mark.parametrize(
    ("settings", "fused"),
    [({}, True), ({"fused": False}, False), ({"foreach": False}, None), ({"foreach": True}, None)],
)
def test_adam_is_fused_unless_another_form_is_asked_for(settings, fused):
    assert build("ls", nn.Linear(2, 2), 2, optimizer=settings).param_groups[0]["fused"] is fused


@pytest.mark.parametrize("name", ["mgda", "graddrop"])
def test_sparse_gradients_are_told(name):
    model = nn.ModuleList([nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizer = build(name, model, 2)
    embedding, *heads = model
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.minimize(lambda: [head(embedding(torch.arange(5))).square().mean() for head in heads])


@pytest.mark.parametrize("name", GRADIENT_BASED)
def test_an_embedding_that_another_optimizer_trains_may_have_sparse_gradients(name, two_heads, batch):
    x, y = batch(tasks=3)
    found = []
    for sparse in (False, True):
        model, embedding = two_heads(3), nn.Embedding(4, x.shape[1], sparse=sparse)
        nn.init.ones_(embedding.weight)
        optimizer, other = build(name, model, 3), torch.optim.SGD(embedding.parameters(), lr=0.1)

        def losses(model=model, embedding=embedding):
            return list(model.losses(x * embedding(torch.arange(len(x)) % 3), y))

        for _ in range(3):
            other.zero_grad()
            optimizer.minimize(losses)
            assert embedding.weight.grad.is_sparse == sparse
            other.step()
        found.append([p.detach() for p in (*model.parameters(), embedding.weight)])
    torch.testing.assert_close(*found)
    assert (found[1][-1][:3] != 1).any()
    assert (found[1][-1][3] == 1).all()
