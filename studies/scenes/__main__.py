"""The tables and the figure of docs/scenes-and-faces.md: ``python -m studies.scenes results docs``.

Every number comes from the exported runs and the tuning files in nyuv2, celeba-cnn and celeba-vit of the first folder, and from
its speed/faces-*.json and speed/loading-*.json; what is not there is "not run yet" or "not measured yet".
"""

from collections.abc import Sequence

from studies.page import folders, write
from studies.scenes.faces import faces_tables
from studies.scenes.figures import plots
from studies.scenes.results import read
from studies.scenes.rooms import rooms_tables
from studies.scenes.speed import speed_tables


def main(arguments: Sequence[str] | None = None) -> None:
    folder, docs = folders("scenes", __doc__, arguments)
    pictures = read(folder)
    drawn = plots(pictures.rooms)
    made = rooms_tables(pictures.rooms, drawn) | faces_tables(pictures.faces) | speed_tables(pictures.steps, pictures.loading)
    write(docs / "scenes-and-faces.md", made, drawn)


if __name__ == "__main__":
    main()
