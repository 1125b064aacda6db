"""Running one cell in its folder: new, from its checkpoint, or not at all if it is done."""

import shlex
import traceback
from pathlib import Path
from typing import Any

from moonopt.errors import UserError, one_sentence
from moonopt.runs import checkpoint
from moonopt.runs.cell import Cell
from moonopt.runs.interrupt import Stop
from moonopt.runs.reproducible import deterministic
from moonopt.runs.store import ERROR, RunFolder, State, writing
from moonopt.runs.train import InterruptedRun, Tell, Training, find_device
from moonopt.tasks.modes import multiplying

CHECKPOINT_SECONDS = 60.0


class RunFailedError(Exception):
    """A run that broke: the text is one sentence, the traceback is in its folder."""


def run_cell(
    cell: Cell,
    root: Path,
    data_folder: Path,
    *,
    stop: Stop,
    tell: Tell,
    go_on: bool = False,
    overwrite: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> dict[str, Any]:
    """The result of a cell.

    Args:
        cell: what to run.
        root: the folder of all runs.
        data_folder: where data lie.
        stop: asked after every step; then ``InterruptedRun`` is raised, and the checkpoint is written.
        tell: gets every record of the run.
        go_on: continue an unfinished run from its checkpoint.
        overwrite: begin anew, whatever is there.
        checkpoint_seconds: at most so much time lies between two checkpoints.

    """
    folder = RunFolder(cell.folder(root))
    with folder.locked():
        state = State.NEW if overwrite else folder.state(cell)
        if state is State.DONE:
            return folder.result() or {}
        if state is State.OTHER:
            find_device(cell.machine.device)  # a device that is not there is no reason to overwrite a run
            raise folder.other_settings(cell)
        if state is State.UNFINISHED and not go_on:
            raise UserError(
                f"{folder.path} holds an unfinished run. Go on with `moonopt resume {shlex.quote(str(folder.path))}`, or begin "
                "anew with --overwrite."
            )
        saved = None
        if state is State.UNFINISHED:
            saved = checkpoint.load(folder.path, cell, lambda text: tell({"kind": "note", "text": text}))
        threads = None if saved is None else saved["threads"]
        with deterministic(cell.seed, cell.settings["train.deterministic"], threads), multiplying(cell.machine.tf32):
            try:
                training = Training(cell, data_folder)
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"{cell.benchmark} cannot {_what_fails(error)}") from error
            if state is State.NEW:
                folder.begin(cell)
            try:
                (folder.path / ERROR).unlink(missing_ok=True)
                return training.run(folder, saved, stop, tell, checkpoint_seconds)
            except (InterruptedRun, UserError):
                raise
            except Exception as error:
                with writing(folder.path / ERROR):
                    (folder.path / ERROR).write_text(traceback.format_exc())
                raise RunFailedError(one_sentence(error) + _hint(error, cell)) from error


def _what_fails(error: Exception) -> str:
    """What a benchmark cannot do: what the system refuses has nothing to do with its settings, nor with a line of code."""
    if not isinstance(error, OSError) or error.strerror is None:
        return f"be made with these settings: {one_sentence(error)}"
    what = f"read or write {error.filename}" if isinstance(error.filename, str) else "be made"
    return f"{what}: {error.strerror}."


def _hint(error: Exception, cell: Cell) -> str:
    """How a setting that an error names is given to a run."""
    if 'nonfinite="skip"' not in str(error):
        return ""
    section = "method" if "method.nonfinite" in cell.settings else "optimizer"
    return f" Here that is --set {section}.nonfinite=skip."
