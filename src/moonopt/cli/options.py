"""The options that commands share, and how they are read."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moonopt.bench.registry import DATA_SETS
from moonopt.errors import UserError, unknown_name
from moonopt.runs.engines import ENGINES
from moonopt.runs.settings import Layer, parse, read_file
from moonopt.runs.tune import read_tuned

PIPE_WIDTH = 200  # where no terminal says how wide it is
out = Console(emoji=False) if sys.stdout.isatty() else Console(width=PIPE_WIDTH, emoji=False)  # "step:100:0.5" has none
err = Console(stderr=True, emoji=False)

BenchmarkName = Annotated[str, typer.Argument(metavar="BENCH", help="A benchmark, or your own as module:Class.")]
DataName = Annotated[str, typer.Argument(metavar="NAME", help="A benchmark, or a data set: " + ", ".join(DATA_SETS) + ".")]
Method = Annotated[str, typer.Option(help="A method, or your own as module:name.")]
Methods = Annotated[str, typer.Option(help="Methods, separated by commas.")]
Seeds = Annotated[str, typer.Option(help="How many seeds, from 0 on; or which, separated by commas.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be repeated.")]
Config = Annotated[Path | None, typer.Option(help="Settings from a JSON file.")]
Tuned = Annotated[Path | None, typer.Option(help="Settings that `moonopt tune` has found.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Amp = Annotated[bool, typer.Option("--amp", help="Compute the losses under autocast in bfloat16.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Multiply float32 matrices in TensorFloat-32, on GPUs that have it.")]
Out = Annotated[Path, typer.Option("--out", help="The folder of all runs.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="Where data lie; then $MOONOPT_DATA, then ~/.cache/moonopt.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever is there.")]
EngineName = Annotated[str, typer.Option("--engine", help="What runs the cells: " + ", ".join(ENGINES) + ".")]
Jobs = Annotated[int, typer.Option(min=1, help="How many cells at a time.")]
Every = Annotated[float, typer.Option("--checkpoint-seconds", min=0, help="At most so long between checkpoints.")]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, or of a study that `moonopt export` made.")]
Reference = Annotated[str | None, typer.Option(help="What Δm refers to: published, or stl.")]

DEFAULT_OUT = Path("runs")


def own_layers(settings: list[str] | None, config: Path | None) -> list[Layer]:
    layers: list[Layer] = [] if config is None else [(f"--config {config}", read_file(config))]
    return [*layers, ("--set", dict(parse(text) for text in settings or []))]


def layers_of(
    benchmark: str, methods: list[str], settings: list[str] | None, config: Path | None, tuned: Path | None
) -> dict[str, list[Layer]]:
    """The settings of every method, in the order in which they override each other."""
    chosen = {} if tuned is None else read_tuned(tuned, benchmark, methods)
    own = own_layers(settings, config)
    return {method: [*([chosen[method]] if method in chosen else []), *own] for method in methods}


def read_names(text: str, what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"Give at least one {what}, separated by commas; found {text!r}.")
    return names


def read_seeds(text: str) -> list[int]:
    """``3`` is 0, 1, 2; ``5,7`` and ``5,`` are themselves."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (0 if "," in text else 1):
        raise UserError(f"--seeds takes how many (3) or which (0,5,7), found {text!r}.")
    return numbers if "," in text else list(range(numbers[0]))


def find_engine(name: str) -> Any:
    if name not in ENGINES:
        raise UserError(unknown_name(name, tuple(ENGINES), "engine"))
    return ENGINES[name]
