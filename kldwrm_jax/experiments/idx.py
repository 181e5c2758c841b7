"""The IDX format of MNIST and its relatives: a magic number, the dimensions, then bytes."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from kldwrm_jax.experiments.errors import UsageError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Reads an array of unsigned bytes, gzip-compressed or raw.

    Args:
      path: the file.
      ndim: how many dimensions it must have: 3 for images, 1 for labels.

    Raises:
      UsageError: if the file is damaged, cut short, or something else altogether.
    """
    content = _content(path)
    if len(content) < 4 + 4 * ndim:
        raise UsageError(f"{path}: cut short: {len(content)} bytes are no IDX header; {_WAY_OUT}")
    if content[:4] != bytes((0, 0, _UNSIGNED_BYTE, ndim)):
        raise UsageError(
            f"{path}: not an IDX file of unsigned bytes with {ndim} dimension(s): it begins with "
            f"{content[:4].hex()}; {_WAY_OUT}"
        )
    shape = tuple(np.frombuffer(content, ">u4", count=ndim, offset=4).tolist())
    body = content[4 + 4 * ndim :]
    if len(body) != math.prod(shape):
        raise UsageError(
            f"{path}: its header says {shape}, {math.prod(shape)} bytes, but {len(body)} follow; "
            f"{_WAY_OUT}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


_WAY_OUT = "delete it and fetch it again"


def _content(path: Path) -> bytes:
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: damaged gzip file ({error}); {_WAY_OUT}") from error
