"""Where data lie."""

import os
from pathlib import Path

from moonopt.errors import UserError


def find_data_folder(option: Path | None = None, must_exist: bool = True) -> Path:
    """``--data``, then ``$MOONOPT_DATA``, then ``~/.cache/moonopt``.

    The last need not be there; the others only where something is to be read from them.
    """
    source, folder = ("--data", option) if option is not None else ("$MOONOPT_DATA", os.environ.get("MOONOPT_DATA"))
    if not folder:
        return Path.home() / ".cache" / "moonopt"
    if not Path(folder).is_dir() and (must_exist or Path(folder).exists()):
        raise UserError(f"There is no folder {folder}, which {source} names for data.")
    return Path(folder)
