"""Filling a page: each of its tables stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; figures are in images."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moonopt.errors import UserError
from moonopt.runs.report.drawing import Plot, files


def folders(name: str, description: str | None, arguments: Sequence[str] | None) -> tuple[Path, Path]:
    """Those of the results and of the docs, from the command line of a study."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{name}", description=description)
    parser.add_argument("results", type=Path, help="the folder that moonopt export wrote to, with the tuning files")
    parser.add_argument("docs", type=Path, help="the folder of the page and images")
    options = parser.parse_args(arguments)
    return options.results, options.docs


def write(page: Path, made: Mapping[str, str], plots: Iterable[Plot]) -> None:
    """Fill the page with its tables, and draw its figures."""
    page.write_text(filled(page.read_text(), made))
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    for plot in plots:
        (images / f"{plot.name}.svg").write_bytes(files(plot)[".svg"])


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with every table between its markers replaced."""
    places = re.findall(r"<!-- table: (\S+) -->", page)
    if sorted(places) != sorted(made):
        raise UserError(f"The page must have each table once: it has {', '.join(places)}, expected {', '.join(made)}.")
    block = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", page)
