"""The tables and the figure of docs/synthetic30.md: ``python -m studies.synthetic30 results docs``.

Every number comes from the exported runs and the tuning files in synthetic30 and synthetic30-spread of the first folder; what
is not there is "not run yet".
"""

from collections.abc import Sequence

from studies.page import folders, write
from studies.synthetic30.figures import plots
from studies.synthetic30.results import read
from studies.synthetic30.tables import tables


def main(arguments: Sequence[str] | None = None) -> None:
    folder, docs = folders("synthetic30", __doc__, arguments)
    problems = read(folder)
    drawn = plots(problems)
    write(docs / "synthetic30.md", tables(problems, drawn), drawn)


if __name__ == "__main__":
    main()
