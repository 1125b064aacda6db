"""What balancing costs: ``python -m moonopt.speed.balance [--json | --markdown]``.

A whole training step (forward, backward, Adam) of every balancer beside that of LS, with few and with many tasks on the same
trunk; and the gradient-based balancers beside TorchJD's, from the same Jacobians to the combined gradient. All of one kind are
interleaved in one run.
"""

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.balance import IMTLG, MGDA, Aggregator, Balancer, CAGrad, GradDrop, NashMTL, PCGrad
from moonopt.balance.base import Engine, Memory, Tasks
from moonopt.methods import BALANCERS, build
from moonopt.speed.measure import command_line, environment, interleaved, show, timing
from moonopt.tasks.losses import read_losses

INPUTS, WIDTH, LAYERS, BATCH = 64, 256, 4, 256  # of the trunk
COLUMNS = 2000  # of a Jacobian
JACOBIANS = 3  # taken in turn, so that what starts from its last answer does not start from the right one


class Trunk(nn.Module):
    """Linear layers that all tasks share, and one linear head per task."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        widths = itertools.pairwise([INPUTS, *[WIDTH] * LAYERS])
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(fan_in, fan_out), nn.GELU()) for fan_in, fan_out in widths))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(tasks))

    def losses(self, x: Tensor, targets: Tensor) -> list[Tensor]:
        """One by one: in the graph of a stacked vector, every parameter would belong to all of them."""
        hidden = self.trunk(x)
        return [(head(hidden)[:, 0] - y).square().mean() for head, y in zip(self.heads, targets, strict=True)]


class Contest(NamedTuple):
    """The same problem under the same convention: our balancer for so many tasks, and TorchJD's aggregator."""

    ours: Callable[[int], Balancer]
    theirs: Callable[[Any, int], Callable[[Tensor], Tensor]]  # from the module torchjd.aggregation


CONTESTS: dict[str, Contest] = {
    "mgda": Contest(MGDA, lambda torchjd, tasks: torchjd.MGDA()),
    "pcgrad": Contest(PCGrad, lambda torchjd, tasks: torchjd.PCGrad()),
    "graddrop": Contest(GradDrop, lambda torchjd, tasks: torchjd.GradDrop()),
    "cagrad": Contest(lambda tasks: CAGrad(tasks, c=0.4, rescale=False), lambda torchjd, tasks: torchjd.CAGrad(c=0.4)),
    "imtl-g": Contest(IMTLG, lambda torchjd, tasks: torchjd.IMTLG()),
    "nash-mtl": Contest(NashMTL, lambda torchjd, tasks: torchjd.NashMTL(tasks, max_norm=0.0)),
}


def measure_steps(
    methods: Sequence[str] = tuple(BALANCERS), tasks: Sequence[int] = (3, 40), rounds: int = 20, device: str = "cpu"
) -> dict[str, Any]:
    """Milliseconds of a training step by method and number of tasks, and how many times as long as that of LS each takes."""
    names = list(dict.fromkeys(["ls", *methods]))
    contestants = {f"{name}, {count}": _stepper(name, count, device) for name in names for count in tasks}
    times = interleaved(contestants, rounds)
    ratios = {name: {count: times[f"{name}, {count}"]["ms"] / times[f"ls, {count}"]["ms"] for count in tasks} for name in names}
    return {"what": "steps", "tasks": list(tasks), "rounds": rounds, "times": times, "ratios": ratios}


def measure_solvers(
    solvers: Sequence[str] = tuple(CONTESTS), tasks: Sequence[int] = (11, 40), rounds: int = 20, device: str = "cpu"
) -> dict[str, Any]:
    """Milliseconds from a Jacobian to the combined gradient, and how many times faster than TorchJD each of ours is."""
    contestants, skipped = contestants_of(solvers, tasks, device)
    times = interleaved(contestants, rounds, repeat=JACOBIANS, warmup=1)
    met = [solver for solver in solvers if f"moonopt {solver}, {tasks[0]}" in contestants]
    speedups = {
        solver: {
            count: times[f"torchjd {solver}, {count}"]["ms"] / times[f"moonopt {solver}, {count}"]["ms"] for count in tasks
        }
        for solver in met
    }
    return {
        "what": "solvers",
        "tasks": list(tasks),
        "columns": COLUMNS,
        "rounds": rounds,
        "torchjd": version("torchjd") if met else None,
        "times": times,
        "speedups": speedups,
        "skipped": skipped,
    }


def contestants_of(
    solvers: Sequence[str], tasks: Sequence[int], device: str = "cpu"
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, list[str]]]:
    """Ours and TorchJD's by name, each for the next Jacobian; and those that TorchJD lacks something for, by what it says."""
    contestants: dict[str, Callable[[], Tensor]] = {}
    skipped: dict[str, list[str]] = {}
    for solver in solvers:
        contest = CONTESTS[solver]
        try:
            torchjd = importlib.import_module("torchjd.aggregation")
            theirs = {count: contest.theirs(torchjd, count) for count in tasks}
        except ImportError as missing:
            skipped.setdefault(str(missing), []).append(solver)
            continue
        for count in tasks:
            jacobians = _jacobians(count, device)
            contestants[f"torchjd {solver}, {count}"] = _in_turn(theirs[count], jacobians)
            contestants[f"moonopt {solver}, {count}"] = _in_turn(_combined(contest.ours(count)), map(_GivenTasks, jacobians))
    return contestants, skipped


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("balance", __doc__, rounds=20)
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/methods/README.md")
    parser.add_argument(
        "--methods", nargs="*", choices=BALANCERS, default=list(BALANCERS), help="whose steps to time beside LS"
    )
    parser.add_argument("--tasks", nargs="+", type=int, default=[3, 40], help="of a step (default 3 40)")
    parser.add_argument("--solvers", nargs="*", choices=CONTESTS, default=list(CONTESTS), help="which beside TorchJD")
    parser.add_argument("--solver-tasks", nargs="+", type=int, default=[11, 40], help="of a solver (default 11 40)")
    options = parser.parse_args(arguments)
    if options.json and options.markdown:
        parser.error("--json and --markdown are two ways to print: choose one")
    results = [
        measure_steps(options.methods, options.tasks, options.rounds, options.device),
        measure_solvers(options.solvers, options.solver_tasks, options.rounds, options.device),
    ]
    if options.markdown:
        where = environment(torch.device(options.device)) | {"rounds": options.rounds}
        print(", ".join(f"{key} {value}" for key, value in where.items()))
        for result in results:
            print("\n" + "\n".join(_markdown(result)))
    else:
        show(options, results, _lines)


def _stepper(name: str, tasks: int, device: str) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Trunk(tasks).to(device)
    x, targets = torch.randn(BATCH, INPUTS, device=device), torch.randn(tasks, BATCH, device=device)
    optimizer = build(name, model, tasks, optimizer={"lr": 1e-4})
    return lambda: optimizer.minimize(model.losses, x, targets)


def _jacobians(tasks: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tasks, COLUMNS, generator=generator).to(device) for _ in range(JACOBIANS)]


def _in_turn(combine: Callable[[Any], Tensor], problems: Iterable[Any]) -> Callable[[], Tensor]:
    following = itertools.cycle(list(problems))
    return lambda: combine(next(following))


class _GivenTasks(Tasks):
    """Tasks whose gradients, in one parameter, are the rows of a Jacobian."""

    def __init__(self, jacobian: Tensor) -> None:
        parameters = [torch.zeros_like(jacobian[0], requires_grad=True)]
        super().__init__(read_losses(jacobian[:, 0]), parameters, parameters, Engine("stored"))
        self.jacobian, self.gradients = jacobian, [[row] for row in jacobian]

    def gradients_one_by_one(self, parameters: Sequence[Tensor] | None = None) -> Iterator[list[Tensor | None]]:
        return iter(self.gradients)


def _combined(balancer: Balancer) -> Callable[[_GivenTasks], Tensor]:
    """The combined gradient, with what the balancer remembers from the last."""
    group: dict[str, Any] = {}
    memory = Memory(lambda: group)
    memory.update(balancer.initial(torch.zeros(len(balancer.tasks))))
    if isinstance(balancer, Aggregator):
        return lambda tasks: balancer.direction(tasks, memory)[tasks.parameters[0]]
    return lambda tasks: balancer.weights(tasks, memory).to(tasks.jacobian) @ tasks.jacobian


def _lines(result: Mapping[str, Any]) -> list[str]:
    return _step_lines(result) if result["what"] == "steps" else _solver_lines(result)


def _step_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [f"A training step with {_listed(result['tasks'])} tasks beside that of LS, median of {result['rounds']} rounds"]
    for name, ratios in result["ratios"].items():
        times = [f"{timing(result['times'][f'{name}, {count}'])}  {ratio:6.2f}x" for count, ratio in ratios.items()]
        lines.append(f"  {name:10} {'  '.join(times)}")
    return lines


def _solver_lines(result: Mapping[str, Any]) -> list[str]:
    title = f"From Jacobians with {_listed(result['tasks'])} rows and {result['columns']} columns to the combined gradient"
    lines = [f"{title}, ours and TorchJD's, median of {result['rounds']} rounds"]
    for solver, speedups in result["speedups"].items():
        for count, speedup in speedups.items():
            ours, theirs = (timing(result["times"][f"{who} {solver}, {count}"]) for who in ("moonopt", "torchjd"))
            lines.append(f"  {solver + ',':10} {count:3}  {ours}  {theirs}  {speedup:6.2f}x")
    return [*lines, *_without(result["skipped"])]


def _markdown(result: Mapping[str, Any]) -> list[str]:
    return _step_table(result) if result["what"] == "steps" else _solver_table(result)


def _step_table(result: Mapping[str, Any]) -> list[str]:
    head = ["a step, in steps of LS", *(f"K = {count}" for count in result["tasks"])]
    return _table(head, [[f"`{name}`", *map(_rounded, by_count.values())] for name, by_count in result["ratios"].items()])


def _solver_table(result: Mapping[str, Any]) -> list[str]:
    head = [f"times as fast as TorchJD {result['torchjd']}", *(f"K = {count}" for count in result["tasks"])]
    rows = [[f"`{name}`", *map(_rounded, by_count.values())] for name, by_count in result["speedups"].items()]
    return [*(_table(head, rows) if rows else []), *_without(result["skipped"])]


def _without(skipped: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"Not measured beside TorchJD: {', '.join(solvers)}. {why}" for why, solvers in skipped.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


def _rounded(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


if __name__ == "__main__":
    main()
