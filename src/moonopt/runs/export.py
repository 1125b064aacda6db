"""The committed form of a study: one small JSON file per method with its overrides, which a report reads like the runs."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonopt.errors import UserError
from moonopt.runs.cell import FORMAT, cell_of, safe, seeds_text
from moonopt.runs.report.reading import Line, Run, read_runs
from moonopt.runs.store import write_whole, writing

#: What is left of curves, and of those of the losses and weights of many tasks, which nobody can tell apart.
MOST_LINES, MANY_TASKS, MOST_LINES_OF_MANY = 50, 20, 10
#: Of more tasks, a matrix of conflicts in every line would be most of the file.
FEW_TASKS = 4
SIGNIFICANT_DIGITS = 4

#: Objects down to this depth have a line per key, so that a change shows as a few lines.
INDENTED = 4


def export(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write the finished runs of one benchmark; the runs of ``stl`` make one file per task. Warns of those that are left out.

    Other seeds of a file that is there already stay in it, so that a study may go on elsewhere; the warning names them.

    Results are exact. Of each curve at most 50 lines stay, with more than 20 tasks at most 10 of the training, always the first
    and the last, in 4 significant digits; the conflict matrix of more than 4 tasks stays in the last line that has one,
    examples in the first and the last.

    Returns:
        The files.

    """
    names = sorted({run.benchmark for run in runs})
    if len(names) != 1:
        raise UserError(f"An export is of one benchmark, found {', '.join(names) or 'no runs'}: give the folder of one.")
    left_out = [f"{_label(run)} seed {run.seed} ({run.trouble})" for run in runs if run.result is None]
    by_label: dict[str, list[Run]] = {}
    for run in sorted((run for run in runs if run.result is not None), key=lambda run: (_label(run), run.seed)):
        by_label.setdefault(_label(run), []).append(run)
    if not by_label:
        raise UserError(f"No run of {names[0]} is finished: there is nothing to export. Found {'; '.join(left_out)}.")
    if left_out:
        warnings.warn(f"Not exported: {'; '.join(left_out)}.", stacklevel=2)
    if made_up := [label for label, found in by_label.items() if any(run.on_made_up_data for run in found)]:
        warnings.warn(f"On made-up data, and not to be kept beside others: {'; '.join(made_up)}.", stacklevel=2)
    files: dict[Path, str] = {}
    for label, found in by_label.items():
        path = Path(out) / f"{safe(label)}.json"
        files[path] = _dump(_content(label, _with_other_seeds(path, found))) + "\n"
    with writing(Path(out)):
        Path(out).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_whole(path, text.encode())
    return list(files)


def thinned(lines: Sequence[Line], most: int = MOST_LINES) -> list[Line]:
    """At most so many lines, evenly spread, with the first and the last.

    >>> [line["step"] for line in thinned([{"step": step} for step in range(11)], most=3)]
    [0, 5, 10]
    """
    if len(lines) <= most:
        return list(lines)
    return [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]


def _most_lines(run: Run) -> int:
    return MOST_LINES if len((run.result or {})["tasks"]) <= MANY_TASKS else MOST_LINES_OF_MANY


def _with_other_seeds(path: Path, runs: Sequence[Run]) -> list[Run]:
    """The runs, and those of other seeds that the file has from before. Warns of what is kept and of what is replaced."""
    by_seed, (first, *others) = {run.seed: run for run in runs}, runs
    for run in others:
        if differing := _other_code(first, run):
            found = f"{run.source} is not of the same {', '.join(differing)} as {first.source}"
            raise UserError(f"{found}: run one of them anew, or export them to different folders.")
    before = read_runs([path]) if path.exists() else []
    replaced = [run.seed for run in before if run.seed in by_seed and run.result != by_seed[run.seed].result]
    kept = [run for run in before if run.seed not in by_seed]
    if len({run.on_made_up_data for run in [*runs, *before]}) > 1:
        raise UserError(f"{path} and these runs are not both of real data, nor both of made-up ones: export to another folder.")
    for run in kept:
        if differing := _differing(first, run):
            keys = ", ".join(differing)
            raise UserError(
                f"{path} has seed {run.seed} with other settings or code ({keys}): move it, or export to another folder."
            )
    if replaced:
        warnings.warn(f"{path.name}: {seeds_text(replaced)} replaced.", stacklevel=3)
    if kept:
        elsewhere = {cell_of(run.config, run.source).machine for run in [*runs, *kept]}
        machines = ", which ran on another kind of machine or in another precision" if len(elsewhere) > 1 else ""
        warnings.warn(f"{path.name}: {seeds_text([run.seed for run in kept])} kept from before{machines}.", stacklevel=3)
    return sorted([*runs, *kept], key=lambda run: run.seed)


def _content(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    first = _without_seed(runs[0])
    config = {key: value for key, value in first.items() if all(run.config.get(key) == value for run in runs)}
    seeds: dict[str, Any] = {}
    for run in runs:
        if str(run.seed) in seeds:
            raise UserError(f"{label} with seed {run.seed} is there twice: the second is {run.source}. Give one.")
        differing = {key: value for key, value in _without_seed(run).items() if key not in config}
        seeds[str(run.seed)] = {
            **({"config": differing} if differing else {}),
            "result": run.result,
            "train": [_rounded(line) for line in thinned(run.train, _most_lines(run))],
            "evaluation": [_rounded(line) for line in _with_few_examples(_last_large_conflict_only(thinned(run.evaluation)))],
        }
    return {
        "format": FORMAT,
        "benchmark": runs[0].benchmark,
        "method": runs[0].method,
        "config": config,
        "seeds": seeds,
    }


def _differing(first: Run, second: Run) -> list[str]:
    """In which settings, or in whose code of a user's own."""
    a, b = ({"benchmark": run.benchmark, **run.config["settings"]} for run in (first, second))
    return [*(key for key in {**a, **b} if a.get(key) != b.get(key)), *_other_code(first, second)]


def _other_code(first: Run, second: Run) -> list[str]:
    """Whose code of a user's own differs, where both know a checksum."""
    a, b = first.own_code, second.own_code
    return [key for key in a if key in b and a[key] != b[key]]


def _label(run: Run) -> str:
    return cell_of(run.config, run.source).label


def _without_seed(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key != "seed"}


def _last_large_conflict_only(lines: Sequence[Line]) -> list[Line]:
    large = [index for index, line in enumerate(lines) if len(line.get("conflict") or ()) > FEW_TASKS]
    return [{**line, "conflict": None} if index in large[:-1] else line for index, line in enumerate(lines)]


def _with_few_examples(lines: Sequence[Line]) -> list[Line]:
    between = [{key: value for key, value in line.items() if key != "examples"} for line in lines[1:-1]]
    return [*lines[:1], *between, *lines[1:][-1:]]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def _dump(value: Any, depth: int = 0) -> str:
    """JSON whose upper levels have a line per key, and a curve a line per line."""
    if depth >= INDENTED or not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False)
    indent = " " * (depth + 1)
    items = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    lines = [(f"{json.dumps(key)}: " if key is not None else "") + _dump(each, depth + 1) for key, each in items]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent}" + f",\n{indent}".join(lines) + f"\n{' ' * depth}{closing}"
