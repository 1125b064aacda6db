"""The plots of docs/performance.md can be drawn from the committed measurements."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from moonopt.speed import plots

RESULTS = Path(__file__).parents[2] / "results" / "speed"


def test_every_plot_is_that_of_the_documentation(tmp_path):
    plots.main([str(RESULTS), str(tmp_path)])
    images = RESULTS.parents[1] / "docs" / "images"
    for name in plots.PLOTS:
        drawn = (tmp_path / f"speed-{name}.svg").read_text()
        assert drawn.startswith("<?xml")
        assert (images / f"speed-{name}.svg").exists()
        assert f"images/speed-{name}.svg" in (RESULTS.parents[1] / "docs" / "performance.md").read_text()
