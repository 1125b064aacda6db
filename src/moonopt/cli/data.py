"""``moonopt data``: list, verify, fetch and make up the data of benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from moonopt.bench import BENCHMARKS, find
from moonopt.bench.data.folder import find_data_folder
from moonopt.bench.registry import find_data
from moonopt.cli.options import DataFolder, DataName, out
from moonopt.errors import UserError
from moonopt.runs.terminal import grid

data_app = typer.Typer(no_args_is_help=True, help="The data of benchmarks.")


@data_app.command("list")
def data_list(data: DataFolder = None) -> None:
    """Where the data of each benchmark come from, and whether they are here."""
    folder = find_data_folder(data)
    table = grid("benchmark", "data", "from")
    for name in BENCHMARKS:
        bench = find(name)()
        table.add_row(name, bench.missing(folder) or ("made up" if bench.is_made_up(folder) else "here"), bench.data_note)
    out.print(table)


@data_app.command("verify")
def data_verify(name: DataName, data: DataFolder = None) -> None:
    """Check that data are there and whole."""
    find_data(name)().verify(find_data_folder(data))
    out.print(f"The data of {name} are here and whole.")


@data_app.command("fetch")
def data_fetch(name: DataName, data: DataFolder = None) -> None:
    """Fetch data from where they are published."""
    folder = find_data_folder(data, must_exist=False)
    find_data(name)().fetch(folder)
    out.print(f"The data of {name} are in {folder}, whole.", soft_wrap=True, highlight=False)


@data_app.command("make")
def data_make(
    name: DataName,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Where to write them; then as --data.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="How many examples (default: a few).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Fixes them.")] = 0,
    size: Annotated[str | None, typer.Option(metavar="HxW", help="Height and width of scenes, as 288x384.")] = None,
    data: DataFolder = None,
) -> None:
    """Make up data in the format of the real ones."""
    folder, bench = out_folder or find_data_folder(data, must_exist=False), find_data(name)()
    if size is not None and bench.made_up_size is None:
        raise UserError(f"--size is for scenes: the images of {name} have one size.")
    bench.make(folder, count, seed, **({} if size is None else {"size": _read_size(size)}))
    out.print(f"Made-up data of {name} are in {folder}.", soft_wrap=True, highlight=False)


def _read_size(text: str) -> tuple[int, int]:
    """Height and width; what a network does not take is refused where it is used."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise UserError(f"--size is written HEIGHTxWIDTH, as 288x384, found {text!r}.")
    return int(height), int(width)
