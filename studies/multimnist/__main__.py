"""The tables and figures of docs/multimnist.md: ``python -m studies.multimnist results/multimnist docs``.

Every number comes from the exported runs and the tuning files in the first folder, and from the exports beside it whose names
go on with "-alone" and "-alone-compiled"; what is not there is "not run yet". Tables stand in the page between
``<!-- table: NAME -->`` and ``<!-- end -->``; figures are images/multimnist-*.svg.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from moonopt.errors import UserError
from moonopt.runs.report.drawing import files
from studies.multimnist.figures import plots
from studies.multimnist.results import read
from studies.multimnist.tables import tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.multimnist", description=__doc__)
    parser.add_argument("results", type=Path, help="the folder that moonopt export wrote, with the tuning files")
    parser.add_argument("docs", type=Path, help="the folder of multimnist.md and images")
    options = parser.parse_args(arguments)
    results = read(options.results)
    page = options.docs / "multimnist.md"
    page.write_text(filled(page.read_text(), tables(results)))
    (options.docs / "images").mkdir(exist_ok=True)
    for plot in plots(results):
        (options.docs / "images" / f"{plot.name}.svg").write_bytes(files(plot)[".svg"])


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with every table between its markers replaced."""
    places = re.findall(r"<!-- table: (\S+) -->", page)
    if sorted(places) != sorted(made):
        raise UserError(f"The page must have each table once: it has {', '.join(places)}, expected {', '.join(made)}.")
    block = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", page)


if __name__ == "__main__":
    main()
