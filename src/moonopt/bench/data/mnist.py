"""MNIST: 60,000 + 10,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes and Burges), as four idx files in one folder.

Any four idx files of those names can stand in for them, plain or compressed: square images of one size, labels from 0 to 9.
"""

import hashlib
from pathlib import Path

from torch import Tensor

from moonopt.bench.data.download import download, write_whole
from moonopt.bench.data.idx import read_content, read_idx, unpacked
from moonopt.errors import UserError

FOLDER = "mnist"
CLASSES = 10

#: The files, images before labels, with the SHA-256 of their uncompressed content.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

#: Where they are published, in the order in which they are asked.
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/{file}.gz",
    "https://storage.googleapis.com/cvdf-datasets/mnist/{file}.gz",
    "https://raw.githubusercontent.com/fgnt/mnist/master/{file}.gz",
)


def read(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (n, height, width) and labels (n) of the training digits, then of the test digits, all as bytes."""
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    paths = [_path(folder, file) for file in SHA256]
    train, test = (_read_part(images, labels) for images, labels in zip(paths[::2], paths[1::2], strict=True))
    sizes = [tuple(images.shape[1:]) for images, _ in (train, test)]
    if sizes[0] != sizes[1] or sizes[0][0] != sizes[0][1]:
        raise UserError(f"The images in {folder / FOLDER} must be squares of one size, found {sizes[0]} and {sizes[1]}.")
    return train, test


def missing(folder: Path) -> str | None:
    """Which files are not there, in a sentence."""
    absent = [file for file in SHA256 if not _path(folder, file).exists()]
    if not absent:
        return None
    return (
        f"Not in {folder / FOLDER}: {', '.join(absent)}. Fetch MNIST with `moonopt data fetch mnist`, or put idx files "
        "of your own there by these names, plain or with .gz."
    )


def verify(folder: Path) -> None:
    """Raise ``UserError`` where a file is missing, damaged or another than MNIST's."""
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    for file, expected in SHA256.items():
        path = _path(folder, file)
        if (found := _checksum(read_content(path))) != expected:
            raise UserError(
                f"{path} is not MNIST's: the SHA-256 of its content is {found}, expected {expected}. Unless it is meant to "
                "stand in, remove it and run `moonopt data fetch mnist`."
            )


def fetch(folder: Path) -> None:
    """Fetch the files that are not there, each from the first mirror that has it; what is there is verified."""
    for file in SHA256:
        path = _path(folder, file)
        if not path.exists():
            write_whole(path, _from_mirrors(file, folder))
    verify(folder)


def _from_mirrors(file: str, folder: Path) -> bytes:
    tried = []
    for mirror in MIRRORS:
        address = mirror.format(file=file)
        try:
            content = unpacked(download(address))
            if (found := _checksum(content)) == SHA256[file]:
                return content
            tried.append(f"{address}: wrong checksum, SHA-256 {found} instead of {SHA256[file]}")
        except UserError as error:
            tried.append(f"{address}: {str(error).rstrip('.')}")
    raise UserError(
        f"{file} cannot be fetched. Tried {'; '.join(tried)}. You can put the files by hand into {folder / FOLDER}: "
        f"{', '.join(SHA256)}, plain or with .gz."
    )


def _read_part(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise UserError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels.")
    if (largest := int(labels.max())) >= CLASSES:
        raise UserError(f"The labels in {labels_path} must be from 0 to {CLASSES - 1}, found {largest}.")
    return images, labels


def _path(folder: Path, file: str) -> Path:
    """Where a file lies: compressed, if it is there in that form alone."""
    plain = folder / FOLDER / file
    packed = plain.with_name(f"{file}.gz")
    return packed if packed.exists() and not plain.exists() else plain


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
