"""Runs as they lie on the disk: folders of runs, or the committed form that ``moonopt export`` writes."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonopt.errors import UserError, first_sentence
from moonopt.runs.cell import FORMAT
from moonopt.runs.store import CONFIG, ERROR, METRICS, RESULT, read_json

Line = Mapping[str, Any]

#: The folder of the trials of ``moonopt tune`` among other runs: they are no part of a study.
TRIALS = "tune"


@dataclass(frozen=True)
class Run:
    """One run. ``result`` is None while it is unfinished; ``error`` is the traceback of one that failed."""

    benchmark: str
    method: str
    overrides: Mapping[str, Any]
    seed: int
    config: Mapping[str, Any]
    result: Mapping[str, Any] | None
    train: Sequence[Line]
    evaluation: Sequence[Line]
    error: str | None
    source: Path

    @property
    def on_made_up_data(self) -> bool:
        """Whether it was, so that its numbers cannot be set beside others."""
        return bool((self.result or {}).get("made_up_data"))

    @property
    def own_code(self) -> dict[str, str]:
        """Checksums of a benchmark and of a method that are a user's own, by what they are of; older runs have none."""
        return {f"code of {name}": checksum for name, checksum in (self.config.get("code") or {}).items()}

    @property
    def trouble(self) -> str | None:
        """Why the run gives no numbers, in a few words; None if it is finished."""
        if self.result is not None:
            return None
        if self.error is not None:
            lines = self.error.strip().splitlines()
            return f"failed ({first_sentence(lines[-1].strip())})" if lines else "failed"
        step = max((line["step"] for line in (*self.train, *self.evaluation)), default=None)
        return "unfinished" if step is None else f"unfinished, at step {step}"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in folders of any level (RUNS, a benchmark, a run) and in exports (a folder or a file), each once.

    Trials of tuning, in a folder "tune", are left out, unless that folder is what was given.
    """
    runs: dict[tuple[Path, int], Run] = {}
    for path in map(Path, paths):
        found = list(_runs_in(path))
        if not found:
            trials = f" Trials of moonopt tune count where their folder {TRIALS} is given." if (path / TRIALS).is_dir() else ""
            raise UserError(
                f"{path} has no runs: expected folders with a {CONFIG}, or files that moonopt export wrote.{trials}"
            )
        for run in found:
            runs[run.source.resolve(), run.seed] = run
    return list(runs.values())


def _runs_in(path: Path) -> Iterator[Run]:
    if path.is_file():
        content = read_json(path)
        if not _is_export(content):
            raise UserError(f"{path} is not a file that moonopt export wrote; of a run, give its folder.")
        yield from _exported(path, content)
    elif path.is_dir():
        folders = {found.parent for name in (CONFIG, METRICS, RESULT, ERROR) for found in _below(path, name)}
        yield from map(_run_in_folder, sorted(folders, key=_natural))
        for file in sorted(_below(path, "*.json"), key=_natural):
            if file.parent not in folders and _is_export(content := _any_json(file)):
                yield from _exported(file, content)
    else:
        raise UserError(f"There is no {path}: expected a folder of runs, a run, or an export.")


def _below(path: Path, name: str) -> Iterator[Path]:
    return (found for found in path.rglob(name) if TRIALS not in found.relative_to(path).parts)


def _run_in_folder(folder: Path) -> Run:
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} has files of a run, but no {CONFIG}: it cannot be told what was run.")
    config = read_json(folder / CONFIG)
    result = read_json(folder / RESULT) if (folder / RESULT).exists() else None
    error = (folder / ERROR).read_text(errors="replace") if result is None and (folder / ERROR).exists() else None
    return _run(config, result, _lines(folder / METRICS, finished=result is not None), error, folder)


def _lines(path: Path, finished: bool) -> list[Line]:
    """The lines of ``metrics.jsonl``; the last one of a run at work may be half written, and is left out."""
    if not path.exists():
        return []
    texts = path.read_text(errors="replace").splitlines()
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            line["kind"], line["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts) and not finished:
                break
            raise UserError(f"{path} is damaged in line {number}: {error}.") from error
        lines.append(line)
    return lines


def _exported(path: Path, content: Mapping[str, Any]) -> Iterator[Run]:
    for seed, found in content["seeds"].items():
        if missing := {"result", "train", "evaluation"} - found.keys():
            raise UserError(f"{path} is damaged: seed {seed} has no {', '.join(sorted(missing))}.")
        config = {**content["config"], **found.get("config", {}), "seed": int(seed)}
        yield _run(config, found["result"], [*found["train"], *found["evaluation"]], None, path)


def _run(config: Line, result: Line | None, lines: Sequence[Line], error: str | None, source: Path) -> Run:
    for content in (config, *([] if result is None else [result])):
        if content.get("format") != FORMAT:
            raise UserError(f"{source} is of format {content.get('format')!r}, expected {FORMAT}: another moonopt made it.")
    missing = [key for key in ("benchmark", "method", "seed", "overrides", "settings") if key not in config]
    missing += [] if result is None else [key for key in ("tasks", "metrics") if key not in result]
    if missing:
        raise UserError(f"{source} is damaged: there is no {', '.join(missing)}.")
    return Run(
        benchmark=config["benchmark"],
        method=config["method"],
        overrides=config["overrides"],
        seed=config["seed"],
        config=config,
        result=result,
        train=[line for line in lines if line["kind"] == "train"],
        evaluation=[line for line in lines if line["kind"] == "evaluation"],
        error=error,
        source=source,
    )


def _any_json(path: Path) -> Any:
    """What a JSON file holds that may be nothing of ours."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error


def _is_export(content: Any) -> bool:
    return isinstance(content, Mapping) and {"format", "benchmark", "config", "seeds"} <= content.keys()


def _natural(path: Path) -> list[tuple[int, str]]:
    """For sorting: seed2 before seed10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", str(path))]
