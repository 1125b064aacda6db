"""The tables and figures of docs/qm9.md: ``python -m studies.qm9 results/qm9 docs``.

Every number comes from the exported runs and the tuning files in the first folder, and from speed/qm9-h200.json beside it; what
is not there is "not run yet" or "not measured yet". Figures are images/qm9-*.svg.
"""

from collections.abc import Sequence

from studies.page import folders, write
from studies.qm9.figures import plots
from studies.qm9.results import read
from studies.qm9.tables import tables


def main(arguments: Sequence[str] | None = None) -> None:
    folder, docs = folders("qm9", __doc__, arguments)
    stages = read(folder)
    drawn = plots(stages)
    write(docs / "qm9.md", tables(stages, drawn), drawn)


if __name__ == "__main__":
    main()
