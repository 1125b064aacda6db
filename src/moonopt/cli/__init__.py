"""The command line: ``moonopt list``, ``show``, ``run``, ``compare``, ``tune``, ``resume``, ``report``, ``export`` and more."""

import io
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from torch import nn

from moonopt.bench import BENCHMARKS, Benchmark, find
from moonopt.bench.data.folder import find_data_folder
from moonopt.bench.registry import import_object
from moonopt.cli.data import data_app
from moonopt.cli.options import (
    DEFAULT_OUT,
    Amp,
    BenchmarkName,
    Compile,
    Config,
    DataFolder,
    Device,
    EngineName,
    Every,
    Jobs,
    Method,
    Methods,
    Out,
    Overwrite,
    Reference,
    Runs,
    Seeds,
    Set,
    Tf32,
    Tuned,
    err,
    find_engine,
    layers_of,
    out,
    own_layers,
    read_names,
    read_seeds,
)
from moonopt.cli.repeating import repeating, uses
from moonopt.errors import UserError, one_sentence, unknown_name
from moonopt.methods import METHODS
from moonopt.optim.parameters import route_parameters
from moonopt.runs.cell import Cell, Machine, make_cell, seeds_text, word
from moonopt.runs.compare import Comparison, Plan, compare as compare_cells, make_cells
from moonopt.runs.engines import Outcome
from moonopt.runs.export import export as export_runs
from moonopt.runs.interrupt import Stop, stopping
from moonopt.runs.provenance import versions
from moonopt.runs.report.reading import TRIALS, Run, read_runs
from moonopt.runs.report.study import studies
from moonopt.runs.report.tables import check_reference, results_table
from moonopt.runs.run import CHECKPOINT_SECONDS, RunFailedError, run_cell
from moonopt.runs.screen import screen_for
from moonopt.runs.settings import resolve
from moonopt.runs.store import CONFIG, RunFolder, State, write_json
from moonopt.runs.terminal import grid, print_results, print_trials
from moonopt.runs.train import InterruptedRun
from moonopt.runs.tune import find_judge, read_grids, tune as tune_methods

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train one model on several objectives at once: run methods on benchmarks, compare them, show the results.",
)
app.add_typer(data_app, name="data")

#: With it errors have a traceback.
DEBUG = "MOONOPT_DEBUG"
MEASUREMENTS = (
    *("polar", "step", "tasks", "balance", "molecules", "faces"),
    *("loading", "together", "memory", "language", "sampling"),
)


def _show_version(asked: bool) -> None:
    if asked:
        out.print(", ".join(f"{package} {version}" for package, version in versions().items()), highlight=False)
        raise typer.Exit


@app.callback()
def _general(
    asked: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions.")] = False,
) -> None:
    """Options without a command."""


def main() -> None:
    """The command line; what a user can mend is one sentence and exit code 2, with a traceback if $MOONOPT_DEBUG is set."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow is no reason to fail where only ASCII can be written
    try:
        app()
    except BrokenPipeError:  # the reader of a pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as error:  # the latter: a folder that may not be read, a disk that fails
        if os.environ.get(DEBUG):
            raise
        err.print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True, highlight=False)
        sys.exit(2)


@app.command("list")
def list_all(data: DataFolder = None) -> None:
    """Benchmarks, methods, and whether their data is here."""
    folder = find_data_folder(data)
    table = grid("benchmark", "tasks", "data", "what it is")
    for name in BENCHMARKS:
        bench = find(name)()
        missing = bench.missing(folder)
        made_up = missing is None and bench.is_made_up(folder)
        here = Text("made up" if made_up else "here", "green") if missing is None else Text("not here", "yellow")
        table.add_row(name, str(len(bench.tasks)), here, f"{bench.title} ({bench.data_note})")
    out.print(table)
    plain = [method for method in METHODS if "+" not in method]
    out.print("\n[bold]methods[/]  " + ", ".join(plain), soft_wrap=True)
    out.print("         and any but moon and muon with Muon instead of Adam, as in famo+muon", soft_wrap=True)


@app.command()
def show(
    benchmark: BenchmarkName, method: Method = "moon", settings: Set = None, config: Config = None, tuned: Tuned = None
) -> None:
    """Every setting, its value and where it comes from."""
    bench = find(benchmark)
    table = grid("setting", "value", "from")
    for key, setting in resolve(bench, method, layers_of(benchmark, [method], settings, config, tuned)[method]).items():
        table.add_row(key, word(setting.value), setting.source)
    out.print(table)
    if bench.tuning:
        out.print(f"\n{bench.name}'s choices: {bench.tuning}", soft_wrap=True, highlight=False)


@app.command()
def run(
    benchmark: BenchmarkName,
    method: Method = "moon",
    seed: Annotated[int, typer.Option(help="Fixes everything that is random.")] = 0,
    settings: Set = None,
    config: Config = None,
    tuned: Tuned = None,
    device: Device = "cpu",
    amp: Amp = False,
    compile: Compile = False,  # noqa: A002 - the option's name
    tf32: Tf32 = False,
    out_folder: Out = DEFAULT_OUT,
    data: DataFolder = None,
    overwrite: Overwrite = False,
    checkpoint_seconds: Every = CHECKPOINT_SECONDS,
) -> None:
    """Train one model, with a progress bar."""
    layers = layers_of(benchmark, [method], settings, config, tuned)[method]
    cell = make_cell(benchmark, method, seed, layers, Machine(device=device, amp=amp, compile=compile, tf32=tf32))
    _run_one(cell, out_folder, find_data_folder(data), overwrite=overwrite, checkpoint_seconds=checkpoint_seconds)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of an unfinished run.")],
    data: DataFolder = None,
    checkpoint_seconds: Every = CHECKPOINT_SECONDS,
) -> None:
    """Go on where a killed run stopped, bit for bit."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.")
    cell = RunFolder(folder).cell()
    path = Path(os.path.abspath(folder))
    root = path.parents[min(2, len(path.parents) - 1)]
    if cell.folder(root) != path:
        raise UserError(f"{folder} is not where its run belongs: expected it to end in {cell.folder(Path())}.")
    _run_one(cell, root, find_data_folder(data), go_on=True, checkpoint_seconds=checkpoint_seconds)


@app.command()
def compare(
    benchmark: BenchmarkName,
    methods: Methods = "moon,muon,famo,mgda,ls",
    seeds: Seeds = "3",
    settings: Set = None,
    config: Config = None,
    tuned: Tuned = None,
    device: Device = "cpu",
    amp: Amp = False,
    compile: Compile = False,  # noqa: A002 - the option's name
    tf32: Tf32 = False,
    out_folder: Out = DEFAULT_OUT,
    data: DataFolder = None,
    overwrite: Overwrite = False,
    engine: EngineName = "local",
    jobs: Jobs = 1,
    checkpoint_seconds: Every = CHECKPOINT_SECONDS,
    reference: Reference = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report, into this folder.")] = None,
) -> None:
    """Run methods x seeds, skip what is done, go on with what is unfinished, and print the table."""
    names = read_names(methods, "method")
    layers = layers_of(benchmark, names, settings, config, tuned)
    check_reference(reference, find(benchmark), names)
    cells = make_cells(benchmark, names, read_seeds(seeds), layers, Machine(device=device, amp=amp, compile=compile, tf32=tf32))
    plan = Plan(out_folder, find_data_folder(data), find_engine(engine), jobs, overwrite, checkpoint_seconds)
    with stopping() as stop, screen_for(sys.stdout) as screen:
        comparison = compare_cells(cells, plan, stop, screen)
    _exit_if_unfinished(comparison, stop, overwrite)
    folders = [cell.folder(out_folder) for cell in cells]
    runs = read_runs([folder for folder in folders if (folder / CONFIG).exists()])
    order = [name for name in names if any(run.method == name for run in runs)]
    for study in studies(runs, order):
        print_results(out, results_table(study, reference), study.headline)
    if report is not None and runs:
        _write_report(runs, report, reference, order)
    _exit_if_failed(comparison, out_folder)


@app.command()
def tune(
    benchmark: BenchmarkName,
    grid: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE,VALUE", help="Values to try, for all methods or as METHOD/KEY=...; may be repeated."),
    ],
    methods: Methods = "moon,muon,famo,mgda,ls",
    seeds: Seeds = "1",
    settings: Set = None,
    config: Config = None,
    device: Device = "cpu",
    amp: Amp = False,
    compile: Compile = False,  # noqa: A002 - the option's name
    tf32: Tf32 = False,
    out_folder: Out = DEFAULT_OUT / TRIALS,
    data: DataFolder = None,
    overwrite: Overwrite = False,
    engine: EngineName = "local",
    jobs: Jobs = 1,
    checkpoint_seconds: Every = CHECKPOINT_SECONDS,
    metric: Annotated[str | None, typer.Option(help="What judges the trials (default: what the benchmark selects by).")] = None,
    file: Annotated[Path | None, typer.Option(help="Where to write the choice (default: tuned.json in the runs).")] = None,
) -> None:
    """Give every method the same number of trials, select on validation data, and write tuned.json."""
    names = read_names(methods, "method")
    grids = read_grids(grid, names)
    bench = find(benchmark)
    judge = None if metric is None else find_judge(bench, metric, names)
    layers = own_layers(settings, config)
    plan = Plan(out_folder, find_data_folder(data), find_engine(engine), jobs, overwrite, checkpoint_seconds)
    machine = Machine(device=device, amp=amp, compile=compile, tf32=tf32)
    with stopping() as stop, screen_for(sys.stdout) as screen:
        comparison, tuned = tune_methods(benchmark, grids, read_seeds(seeds), layers, plan, stop, screen, machine, judge)
    _exit_if_unfinished(comparison, stop, overwrite)
    print_trials(out, tuned, judge or bench.headline_metric())
    path = file or next(iter(comparison.cells)).folder(out_folder).parents[1] / "tuned.json"
    write_json(path, tuned | {"command": repeating(sys.argv[1:])})
    for command in uses(benchmark, tuned["chosen"], path, layers, machine):
        out.print(f"\nUse it with: {command}", soft_wrap=True, highlight=False, markup=False)
    _exit_if_failed(comparison, out_folder)


@app.command()
def report(
    runs: Runs,
    out_folder: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("report"),
    reference: Reference = None,
    methods: Annotated[
        str | None, typer.Option(help="The order of the methods; the first is compared with each other.")
    ] = None,
) -> None:
    """One self-contained HTML page; also SVG, PNG, CSV, Markdown, LaTeX."""
    order = None if methods is None else read_names(methods, "method")
    _write_report(read_runs(runs), out_folder, reference, order)


@app.command()
def export(
    runs: Runs,
    out_folder: Annotated[Path, typer.Option("--out", help="The folder to write, such as results/toy.")],
) -> None:
    """The small form of a study, to be committed; `moonopt report` reads it too."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        paths = export_runs(read_runs(runs), out_folder)
    for warning in told:
        err.print(Text(str(warning.message), "yellow"), soft_wrap=True)
    for path in paths:
        out.print(str(path), soft_wrap=True, highlight=False)


@app.command()
def inspect(
    name: Annotated[str, typer.Argument(metavar="BENCH|MODULE:FACTORY", help="A benchmark, or a function that makes a model.")],
) -> None:
    """Which parameters are matrices, their share, and why."""
    model = find(name)().model() if name in BENCHMARKS or ":" not in name else _made(name)
    out.print(str(route_parameters(model)), soft_wrap=True, highlight=False, markup=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def speed(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help=", ".join(MEASUREMENTS) + ".")],
) -> None:
    """Measure times and memory, most of them against peers: speed WHAT [--json] [--device D], and more by --help."""
    if what in ("--help", "-h"):
        out.print(context.get_help(), "Each has options of its own: moonopt speed WHAT --help", sep="\n", highlight=False)
        return
    if what not in MEASUREMENTS:
        raise UserError(unknown_name(what, MEASUREMENTS, "measurement"))
    sys.argv = [f"moonopt speed {what}", *context.args]
    import_object(f"moonopt.speed.{what}:main", "measurement")()


def _made(name: str) -> nn.Module:
    """The model of a user's benchmark, or what a user's function makes."""
    made = import_object(name, "model")
    try:
        made = made() if callable(made) else made
        model = made.model() if isinstance(made, Benchmark) else made
    except Exception as error:
        raise UserError(f"{name} cannot be made: {one_sentence(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} must be a benchmark or make a model, found {model!r}.")
    return model


def _run_one(cell: Cell, root: Path, data_folder: Path, **how: Any) -> None:
    """One cell in this process."""
    folder = cell.folder(root)
    done = RunFolder(folder).state(cell) is State.DONE and not how.get("overwrite")
    with stopping() as stop:
        try:
            with screen_for(sys.stdout) as screen:
                screen.begin([cell])
                result = run_cell(cell, root, data_folder, stop=stop, tell=lambda record: screen.record(0, record), **how)
                screen.end(0, Outcome(cell, "done", result))
        except InterruptedRun:
            _exit_if_stopped(stop, f"go on with: moonopt resume {shlex.quote(str(folder))}")
        except RunFailedError as error:
            if os.environ.get(DEBUG):
                raise
            text = f"{error} The traceback is in {folder / 'error.txt'}."
            err.print(Text.assemble(("Failed: ", "bold red"), text), soft_wrap=True, highlight=False)
            raise typer.Exit(1) from error
    for study in studies(read_runs([folder])):
        print_results(out, results_table(study), study.headline)
    out.print(f"{'Was done already' if done else 'Result'}: {folder / 'result.json'}", soft_wrap=True, highlight=False)


def _write_report(runs: Sequence[Run], folder: Path, reference: str | None, order: Sequence[str] | None) -> None:
    from moonopt.runs.report.page import write_report  # matplotlib takes its time

    out.print(f"\nReport: {write_report(runs, folder, reference, order)}", soft_wrap=True, highlight=False)


def _exit_if_stopped(stop: Stop, advice: str) -> None:
    if stop.requested:
        err.print(f"Stopped, with a checkpoint; {advice}", soft_wrap=True, highlight=False, style="yellow")
        raise typer.Exit(stop.exit_code)


def _exit_if_unfinished(comparison: Comparison, stop: Stop, overwrite: bool) -> None:
    if len(comparison.finished) < len(comparison.cells):
        _exit_if_stopped(stop, "the same command goes on" + ", if without --overwrite" * overwrite)


def _exit_if_failed(comparison: Comparison, root: Path) -> None:
    alike: dict[tuple[str, str], list[Cell]] = {}
    for outcome in comparison.failed:
        alike.setdefault((outcome.cell.label, outcome.text), []).append(outcome.cell)
    for (label, text), cells in alike.items():
        seeds = seeds_text(sorted(cell.seed for cell in cells))
        told = f"{label} {seeds} failed: {text} ({cells[0].folder(root)})"
        err.print(Text(told, "red"), soft_wrap=True, highlight=False)
    if comparison.failed:
        raise typer.Exit(1)
