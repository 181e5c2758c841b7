"""Fetches a file from the first mirror that has it, and uses it only if it is the right one."""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from kldwrm_jax.experiments.errors import UsageError

Advance = Callable[[int, int | None], None]  # bytes so far; bytes in all, if known

_CHUNK = 1 << 16
_TIMEOUT = 30.0  # seconds without a byte


def fetch(filename: str, mirrors: Sequence[str], md5: str, folder: Path, advance: Advance) -> Path:
    """Downloads ``filename`` into ``folder``, unless it is there and is the right one.

    The file gets its name after its checksum was right.

    Args:
      filename: of the file, under every mirror.
      mirrors: addresses that end in a slash, tried in turn.
      md5: the checksum that identifies the file.
      folder: where it is kept; made if need be.
      advance: told the bytes so far, and in all where the server says so.

    Returns:
      The path of the file.

    Raises:
      UsageError: if no mirror gave the right file.
    """
    path = folder / filename
    if path.exists() and _md5(path.read_bytes()).hexdigest() == md5:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for mirror in mirrors:
        handle, name = tempfile.mkstemp(prefix=f".{filename}.", dir=folder)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                found = _copy(mirror + filename, file, advance)
            if found == md5:
                return temporary.replace(path)
            failures.append(f"{mirror}{filename}: its MD5 is {found}, not {md5}")
        except (OSError, urllib.error.URLError, ValueError) as error:
            failures.append(f"{mirror}{filename}: {error}")
        finally:
            temporary.unlink(missing_ok=True)
    raise UsageError(
        "\n  ".join([f"{filename} could not be downloaded:", *failures])
        + "\nIf you have the file, name its folder by --data-dir or the variable KLDWRM_DATA."
    )


def _md5(content: bytes = b"") -> Any:
    return hashlib.md5(content, usedforsecurity=False)


def _copy(url: str, file: IO[bytes], advance: Advance) -> str:
    digest = _md5()
    request = urllib.request.Request(url, headers={"User-Agent": "kldwrm_jax"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        length = response.headers.get("Content-Length")
        total, done = int(length) if length else None, 0
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            advance(done, total)
    if total is not None and done != total:
        raise OSError(f"cut short: {done} of {total} bytes")
    return digest.hexdigest()
