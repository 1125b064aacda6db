"""Fetching a file: its bytes from an address, with a progress bar, and onto the disk whole or not at all."""

import http.client
import os
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError

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
            with _with_progress(response, expected, address.rpartition("/")[2]) as body:
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
    """Write a file under another name, then rename it: whoever looks finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _with_progress(body: BinaryIO, length: int | None, name: str) -> AbstractContextManager[BinaryIO]:
    """The body, with a bar in a terminal where rich is there."""
    try:
        from rich.console import Console
        from rich.progress import wrap_file
    except ImportError:
        return nullcontext(body)
    console = Console(stderr=True)
    return wrap_file(body, length or 0, description=name, console=console, disable=not console.is_terminal)
