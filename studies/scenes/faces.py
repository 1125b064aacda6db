"""The tables on faces: 40 attributes, read by each of two networks."""

from collections.abc import Callable, Mapping

from moonopt.bench import Metric
from moonopt.bench.celeba import CelebA
from studies.entries import NOT_RUN
from studies.results import Results, Variant
from studies.scenes.results import MOON
from studies.tables import differences_table, metrics_table, missing
from studies.tuning import files

#: The rates of these were chosen; the others are trained at that of ``ls``.
TUNED = ("moon", "muon", "famo", "ls")
METHODS = (*TUNED, "mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl")
OTHERS: tuple[Variant, ...] = tuple((name, {}) for name in METHODS[1:])
SUMMARIES = tuple(metric for metric in CelebA.metrics if metric.task is None)
F1: Metric = SUMMARIES[0]


def faces_tables(faces: Mapping[str, Results]) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    pairs = [(MOON, other) for other in OTHERS]

    def each(table: Callable[[Results], str]) -> str:
        return "\n\n".join(f"`{network}`:\n\n{table(results)}" for network, results in faces.items())

    return {
        "faces-tuning": each(lambda results: files(results.tuning, lambda score: f"{-score:.4f}")),
        "faces-main": each(lambda results: metrics_table({name: results.row(name) for name in METHODS}, SUMMARIES)),
        "faces-differences": each(lambda results: differences_table(results, pairs, [F1])),
        "faces-missing": _missing(faces),
    }


def _missing(faces: Mapping[str, Results]) -> str:
    found = {}
    for network, results in faces.items():
        tuned = {method for each in results.tuning.values() for method in each["chosen"]}
        found[f"{network}, not tuned yet"] = [name for name in TUNED if name not in tuned]
        found[f"{network}, {NOT_RUN}"] = [name for name in METHODS if results.row(name) is None]
    return missing(found)
