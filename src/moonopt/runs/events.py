"""TensorBoard event files of a run, where tensorboard is installed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moonopt.runs.store import writing


class EventFiles:
    """What goes into metrics.jsonl, as scalars by step. A resumed run hides what came after its checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer = None
        else:
            with writing(folder):
                self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        with writing(self._folder):
            for name, value in _scalars(record):
                self._writer.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        """What a checkpoint counts as done is on the disk."""
        if self._writer is not None:
            with writing(self._folder):
                self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with writing(self._folder):
                self._writer.close()


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", number) for name, number in value.items() if number is not None)
        elif key in ("lr", "memory_mb"):
            yield key, value
