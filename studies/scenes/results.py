"""What was run: NYU-v2's own scenes with Δm against the ``stl`` runs beside, faces with two networks, and what was timed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from moonopt.bench.celeba import CelebA, CelebaCNN, CelebaViT
from moonopt.bench.nyuv2 import NYUv2Small
from moonopt.runs.report.delta import DELTA, Reference, single_reference, why_unusable
from moonopt.runs.report.reading import Line
from moonopt.runs.report.study import Outcome
from moonopt.runs.single import TASK
from studies.results import LOG_AUTO, Results, Speed, Variant, read_exports, read_speed, read_tuning, study_of

MOON: Variant = ("moon", {})
ROBUST: Variant = ("moon", LOG_AUTO)

NETWORKS: Mapping[str, type[CelebA]] = {bench.name: bench for bench in (CelebaCNN, CelebaViT)}


@dataclass(frozen=True)
class Rooms(Results):
    """NYU-v2's scenes, with Δm in results and evaluations; ``reference`` is None where ``stl`` has not all numbers."""

    reference: Reference | None

    given: ClassVar = ("optimizer.vector_lr", TASK)


@dataclass(frozen=True)
class Faces(Results):
    """Made-up faces, read by one network."""

    #: What the script sets for all.
    given: ClassVar = ("train.batch_size", "train.epochs", "train.log_every", "train.conflict")


@dataclass(frozen=True)
class Pictures:
    """All of the page; ``steps`` are by ``moonopt.speed.faces``, ``loading`` by ``moonopt.speed.loading``."""

    rooms: Rooms
    faces: Mapping[str, Faces]
    steps: Sequence[Speed]
    loading: Sequence[Speed]


def read(folder: Path) -> Pictures:
    faces = {name: _faces(folder / name, bench) for name, bench in NETWORKS.items()}
    speed = folder / "speed"
    return Pictures(_rooms(folder / "nyuv2"), faces, read_speed(speed, "faces-*.json"), read_speed(speed, "loading-*.json"))


def _faces(folder: Path, bench: type[CelebA]) -> Faces:
    return Faces(study_of(read_exports(folder), bench), read_tuning(folder))


def _rooms(folder: Path) -> Rooms:
    study = study_of(read_exports(folder), NYUv2Small)
    single = next((row for row in study.rows if row.is_single), None)
    by_seed = {} if single is None else {outcome.seed: outcome.metrics for outcome in single.outcomes}
    reference = single_reference("stl", by_seed, NYUv2Small.metrics)
    if reference is None or why_unusable(reference, NYUv2Small) is not None:
        return Rooms(study, read_tuning(folder), None)
    rows = [replace(row, outcomes=[_with_delta(each, reference) for each in row.outcomes]) for row in study.rows]
    return Rooms(replace(study, rows=rows), read_tuning(folder), reference)


def _with_delta(outcome: Outcome, reference: Reference) -> Outcome:
    def with_delta(values: Mapping[str, float]) -> dict[str, float]:
        return {**values, DELTA.name: reference.delta(outcome.seed, values, NYUv2Small.metrics)}

    lines: list[Line] = [{**line, "test": with_delta(line["test"])} for line in outcome.evaluation if line.get("test")]
    return replace(outcome, metrics=with_delta(outcome.metrics), evaluation=lines)
