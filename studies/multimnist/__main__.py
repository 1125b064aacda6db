"""The tables and figures of docs/multimnist.md: ``python -m studies.multimnist results/multimnist docs``.

Every number comes from the exported runs and the tuning files in the first folder, and from the exports beside it whose names
go on with "-alone", "-first" and "-exact"; what is not there is "not run yet". Figures are images/multimnist-*.svg.
"""

from collections.abc import Sequence

from studies.multimnist.figures import plots
from studies.multimnist.results import read
from studies.multimnist.tables import tables
from studies.page import folders, write


def main(arguments: Sequence[str] | None = None) -> None:
    folder, docs = folders("multimnist", __doc__, arguments)
    results = read(folder)
    write(docs / "multimnist.md", tables(results), plots(results))


if __name__ == "__main__":
    main()
