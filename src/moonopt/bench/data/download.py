"""Fetching a file: its bytes from an address, with a progress bar, and onto the disk whole or not at all."""

import http.client
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError

from moonopt.bench.data.progress import read_with_bar
from moonopt.errors import UserError

TIMEOUT = 30  # seconds without an answer
CHUNK = 1 << 16  # bytes between two moves of the progress bar


def download(address: str) -> bytes:
    """What lies at an address, all of it; ``UserError`` says why not."""
    request = urllib.request.Request(address, headers={"User-Agent": "moonopt"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            length = response.headers["Content-Length"]
            expected = None if length is None else int(length)
            with read_with_bar(response, expected, address.rpartition("/")[2]) as body:
                content = b"".join(iter(lambda: body.read(CHUNK), b""))
    except HTTPError as error:
        raise UserError(f"HTTP {error.code} {error.reason}") from error
    except URLError as error:
        raise UserError(f"no connection ({error.reason})") from error
    except http.client.IncompleteRead as error:
        raise UserError(f"truncated after {len(error.partial)} bytes") from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"the connection broke ({error or type(error).__name__})") from error
    if expected is not None and len(content) != expected:
        raise UserError(f"truncated after {len(content)} of {expected} bytes")
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, into a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Another name to write a file under, which is then renamed: whoever looks finds all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # which what fails in writing does not say by itself
        raise
    finally:
        temporary.unlink(missing_ok=True)
