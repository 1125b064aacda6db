"""How to repeat every number: settings, commands, commits, versions, hardware."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonopt.runs.cell import word
from moonopt.runs.report.layout import DASH, Column, Entry, Table, TableRow
from moonopt.runs.report.study import Row, Run, Study
from moonopt.runs.single import TASK


@dataclass(frozen=True)
class Recipe:
    """How to repeat a row: a command per run, and what it ran with; several values are named where runs differ."""

    label: str
    commands: Sequence[str]
    commit: str
    versions: str
    hardware: str
    finished: str


def recipe(row: Row) -> Recipe:
    """The recipe of a row."""
    results = [run.result or {} for outcome in row.outcomes for run in outcome.runs]
    dates = sorted(str(result["finished"]) for result in results if result.get("finished"))
    return Recipe(
        row.label,
        [str(result.get("command") or "no command is recorded") for result in results],
        _all_of(results, "commit"),
        _all_of(results, "versions"),
        _all_of(results, "hardware"),
        " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "not recorded",
    )


def made_differently(runs: Sequence[Run]) -> list[str]:
    """A sentence if runs differ in commit, own code, torch, device or precision: their numbers may differ for that reason."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        result = run.result or {}
        hardware, versions = result.get("hardware") or {}, result.get("versions") or {}
        origins = {"commit": result.get("commit"), "torch": versions.get("torch"), "device": hardware.get("device")}
        for key, value in (origins | run.own_code | {key: run.config.get(key) for key in ("amp", "compile")}).items():
            found.setdefault(key, {})[_text(value)] = None
    differing = [f"{key} ({', '.join(values)})" for key, values in found.items() if len(values) > 1]
    return [f"The runs were not all made alike: they differ in {'; '.join(differing)}."] if differing else []


@dataclass(frozen=True)
class Settings:
    """The settings of a study: those in which rows differ, those that only some rows have, and those that all share."""

    differing: Table
    partial: Table
    shared: Mapping[str, str]


def settings_of(study: Study) -> Settings:
    """Every setting of every row, and where it ran."""
    by_row = [_settings(row) for row in study.rows]
    keys = sorted({key for settings in by_row for key in settings})
    texts = {key: [settings.get(key, DASH) for settings in by_row] for key in keys}
    values = {key: {settings[key] for settings in by_row if key in settings} for key in keys}
    columns = [Column(row.label, numeric=False) for row in study.rows]

    def table(title: str, chosen: Sequence[str]) -> Table:
        return Table(title, "setting", columns, [TableRow(key, [Entry(text) for text in texts[key]]) for key in chosen])

    differing = [key for key in keys if len(values[key]) > 1]
    partial = [key for key in keys if len(values[key]) == 1 and DASH in texts[key]]
    shared = {key: texts[key][0] for key in keys if key not in differing and key not in partial}
    return Settings(table("Settings that differ", differing), table("Settings that only some have", partial), shared)


def _settings(row: Row) -> dict[str, str]:
    """Every setting of a row as text, and where it ran; values that differ among its runs are all named."""
    found: dict[str, dict[str, None]] = {}
    for outcome in row.outcomes:
        for run in outcome.runs:
            machine = {key: run.config[key] for key in ("device", "amp", "compile", "tf32") if key in run.config}
            for key, value in {**run.config["settings"], **machine}.items():
                if key != TASK:
                    found.setdefault(key, {})[_value(value)] = None
    return {key: " / ".join(values) for key, values in found.items()}


def _value(value: Any) -> str:
    """A setting as ``--set`` reads it, in which 0 and 0.0 are the same."""
    return f"{value:.12g}" if isinstance(value, int | float) and not isinstance(value, bool) else word(value)


def _all_of(results: Sequence[Mapping[str, Any]], key: str) -> str:
    """A field of the results as text, every different value once."""
    return " / ".join(dict.fromkeys(_text(result.get(key)) for result in results)) or "not recorded"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return "not recorded" if value is None else word(value)
