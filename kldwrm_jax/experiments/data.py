"""Images with labels: found or downloaded, read and checked."""

import dataclasses
import gzip
import math
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kldwrm_jax.experiments.errors import UsageError, check_names

NAMES, VARIABLE = ("digits", "mnist"), "KLDWRM_DATA"


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Images in [0, 1], labels, and the moments that training images are normalised by."""

    name: str
    train_x: np.ndarray  # (examples, ...) float32
    train_y: np.ndarray  # (examples,) int32
    test_x: np.ndarray
    test_y: np.ndarray
    mean: float
    std: float


FILES = {  # MD5 of the gzipped files
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def load(name: str, data_dir: Path | None = None) -> Dataset:
    """Loads ``"digits"`` (ships with scikit-learn) or ``"mnist"``.

    ``data_dir`` is a folder with MNIST's IDX files, or others of that format and name, gzipped or
    raw. It defaults to the environment variable ``KLDWRM_DATA``; without it, MNIST is downloaded
    once into the user's cache.
    """
    check_names("--dataset", [name], NAMES)
    if name == "digits":
        return _digits()
    folder = data_dir or os.environ.get(VARIABLE)
    if folder:
        files = [_find(Path(folder).expanduser(), file) for file in FILES]
    else:
        files = [download(file, MIRRORS, md5) for file, md5 in FILES.items()]
    arrays = [read_idx(path, 3 if "images" in path.name else 1) for path in files]
    for path, x, y in zip(files[1::2], arrays[::2], arrays[1::2], strict=True):
        if len(x) != len(y) or not len(x):
            raise _damaged(path, f"{len(y)} labels for {len(x)} images")
    x, test_x = (x[..., None].astype(np.float32) / 255 for x in arrays[::2])
    y, test_y = (y.astype(np.int32) for y in arrays[1::2])
    return Dataset(name, x, y, test_x, test_y, mean=0.1307, std=0.3081)


def _digits() -> Dataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    images, labels = (x / 16).reshape(-1, 8, 8, 1).astype(np.float32), y.astype(np.int32)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x, test_x, y, test_y = split
    return Dataset("digits", x, y, test_x, test_y, float(x.mean()), float(x.std()))


def _find(folder: Path, file: str) -> Path:
    spellings = file, file.removesuffix(".gz")
    for path in (place / each for place in (folder / "mnist", folder) for each in spellings):
        if path.is_file():
            return path
    raise UsageError(
        f"no {' or '.join(spellings)} in {folder} or {folder / 'mnist'}, the folder given by "
        f"--data-dir or {VARIABLE}; without either, it is downloaded"
    )


def download(file: str, mirrors: Sequence[str], md5: str, folder: Path | None = None) -> Path:
    """Downloads a file from the first mirror that has it, unless it is in the folder, the cache."""
    import pooch

    pooch.get_logger().setLevel("ERROR")  # a failure is reported once no mirror is left
    get = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=30)
    folder, failures = folder or Path(pooch.os_cache("kldwrm_jax")) / "mnist", []
    for url in (mirror + file for mirror in mirrors):
        try:
            return Path(pooch.retrieve(url, f"md5:{md5}", file, folder, downloader=get))
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            failures.append(f"{url}: {error}")
    raise UsageError(
        "\n  ".join([f"{file} could not be downloaded:", *failures])
        + f"\nIf you have the file, pass its folder with --data-dir or set {VARIABLE}."
    )


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Reads an IDX file, MNIST's format, of unsigned bytes in ``ndim`` dimensions."""
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"damaged gzip file ({error})") from error
    if content[:4] != bytes((0, 0, 8, ndim)) or len(content) < 4 + 4 * ndim:
        raise _damaged(path, f"not an IDX file of unsigned bytes with {ndim} dimension(s)")
    shape = tuple(np.frombuffer(content, ">u4", count=ndim, offset=4).tolist())
    body = content[4 + 4 * ndim :]
    if len(body) != math.prod(shape):
        raise _damaged(path, f"{math.prod(shape)} bytes expected for {shape}, found {len(body)}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _damaged(path: Path, problem: str) -> UsageError:
    return UsageError(f"{path}: {problem}; delete it and download it again")
