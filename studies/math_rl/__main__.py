"""The tables and figures of docs/math-rl.md: ``python -m studies.math_rl results/math-rl docs``.

Every number comes from the exported runs in the first folder, and from speed/language-h200.json and sampling-h200.json beside
it; what is not there is "not run yet" or "not measured yet". Figures are images/math-rl-*.svg.
"""

from collections.abc import Sequence

from studies.math_rl.figures import plots
from studies.math_rl.results import read
from studies.math_rl.tables import tables
from studies.page import folders, write


def main(arguments: Sequence[str] | None = None) -> None:
    folder, docs = folders("math_rl", __doc__, arguments)
    results = read(folder)
    drawn = plots(results)
    write(docs / "math-rl.md", tables(results, drawn), drawn)


if __name__ == "__main__":
    main()
