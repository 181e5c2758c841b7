"""Data sets: images or feature vectors with whole-number labels, for training and for testing."""

import dataclasses
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from kldwrm_jax.experiments.download import Advance, fetch
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.idx import read_idx

VARIABLE = "KLDWRM_DATA"


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs in [0, 1] if they were bytes, as they are otherwise; labels from 0.

    ``mean`` and ``std`` are the numbers by which training inputs are normalised.
    """

    name: str
    train_x: np.ndarray  # (examples, ...) float32
    train_y: np.ndarray  # (examples,) int32
    test_x: np.ndarray
    test_y: np.ndarray
    mean: float
    std: float

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return int(max(self.train_y.max(), self.test_y.max())) + 1


@dataclasses.dataclass(frozen=True)
class Remote:
    """Four IDX files that several mirrors have. ``md5``: of the compressed files, by name."""

    mirrors: tuple[str, ...]
    md5: Mapping[str, str]
    moments: tuple[float, float] | None  # mean and std, where the field agrees on them


_TRAIN_X, _TRAIN_Y = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_TEST_X, _TEST_Y = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"

REMOTES = {
    "mnist": Remote(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://raw.githubusercontent.com/fgnt/mnist/master/",
        ),
        {
            _TRAIN_X: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            _TRAIN_Y: "d53e105ee54ea40749a09fcbcd1e9432",
            _TEST_X: "9fb629c4189551a2d022fa330f9573f3",
            _TEST_Y: "ec29112dd5afa0611ce80d1b7f02629c",
        },
        (0.1307, 0.3081),
    ),
    "fashion-mnist": Remote(
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        {
            _TRAIN_X: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            _TRAIN_Y: "25c81989df183df01b3e8a0aad5dffbe",
            _TEST_X: "bef4ecab320f06d8554ea6380940ec79",
            _TEST_Y: "bb300cfdad3c16e7a12a480ee83cd310",
        },
        None,
    ),
}

NAMES = ("digits", *REMOTES, "npz:PATH")


def _silent(filename: str) -> Advance:
    return lambda done, total: None


def load(
    name: str, data_dir: Path | None = None, watch: Callable[[str], Advance] = _silent
) -> Dataset:
    """A data set by name.

    Args:
      name: ``"digits"`` (comes with scikit-learn), ``"mnist"``, ``"fashion-mnist"``, or
        ``"npz:PATH"``, a file with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.
      data_dir: a folder with the four IDX files of MNIST or Fashion-MNIST, gzip or raw, or with a
        folder of the data set's name that has them; None looks where the environment variable
        ``KLDWRM_DATA`` says and, without it, downloads them once into the user's cache.
      watch: given the name of a file that is downloaded, returns what is told its progress.

    Raises:
      UsageError: for an unknown name, and for files that are missing or damaged.
    """
    if name == "digits":
        return _digits()
    if name.startswith("npz:"):
        return _npz(name, Path(name.removeprefix("npz:")).expanduser())
    if name in REMOTES:
        return _idx(name, REMOTES[name], _files(name, data_dir, watch))
    raise UsageError(f"--dataset: unknown name {name!r}; choose from {', '.join(NAMES)}")


def cache_folder(name: str) -> Path:
    """Where a downloaded data set is kept."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("kldwrm_jax")) / name


def _dataset(
    name: str,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    moments: tuple[float, float] | None = None,
) -> Dataset:
    train_x, train_y, test_x, test_y = arrays
    train_x, test_x = _scaled(train_x), _scaled(test_x)
    mean, std = moments or (float(train_x.mean()), float(train_x.std()))
    return Dataset(
        name, train_x, train_y.astype(np.int32), test_x, test_y.astype(np.int32), mean, std or 1.0
    )


def _scaled(x: np.ndarray) -> np.ndarray:
    scaled = x.astype(np.float32) / (255 if x.dtype == np.uint8 else 1)
    return scaled[..., None] if scaled.ndim == 3 else scaled  # an image has channels


def _digits() -> Dataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    images = (x / 16).reshape(-1, 8, 8).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, y, test_size=0.25, random_state=0, stratify=y
    )
    return _dataset("digits", (train_x, train_y, test_x, test_y))


def _files(name: str, data_dir: Path | None, watch: Callable[[str], Advance]) -> dict[str, Path]:
    remote = REMOTES[name]
    given = data_dir or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if given is not None:
        return {file: _find(given.expanduser(), name, file) for file in remote.md5}
    return {
        file: fetch(file, remote.mirrors, md5, cache_folder(name), watch(file))
        for file, md5 in remote.md5.items()
    }


def _find(folder: Path, name: str, file: str) -> Path:
    places = [
        place / spelling
        for place in (folder / name, folder)
        for spelling in (file, file.removesuffix(".gz"))
    ]
    for path in places:
        if path.is_file():
            return path
    raise UsageError(
        f"{name}: no {file} (nor {file.removesuffix('.gz')}) in {folder} or {folder / name}, the "
        f"folder given by --data-dir or {VARIABLE}; without both it is downloaded"
    )


def _idx(name: str, remote: Remote, files: Mapping[str, Path]) -> Dataset:
    train_x, test_x = (read_idx(files[file], 3) for file in (_TRAIN_X, _TEST_X))
    train_y, test_y = (read_idx(files[file], 1) for file in (_TRAIN_Y, _TEST_Y))
    _check(files[_TRAIN_Y], train_x, train_y)
    _check(files[_TEST_Y], test_x, test_y)
    return _dataset(name, (train_x, train_y, test_x, test_y), remote.moments)


def _check(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Inputs and labels are numbers and belong together."""
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or not np.isfinite(x).all():
        raise UsageError(f"{path}: inputs must be finite numbers, got {x.dtype} or NaN or infinity")
    if len(x) != len(y) or not len(x):
        raise UsageError(f"{path}: {len(y)} labels for {len(x)} inputs")
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise UsageError(
            f"{path}: labels must be whole numbers from 0 on, one an input; got shape {y.shape}, "
            f"{y.dtype}"
        )


_KEYS = ("x_train", "y_train", "x_test", "y_test")


def _npz(name: str, path: Path) -> Dataset:
    if not path.is_file():
        raise UsageError(f"--dataset {name}: there is no file {path}")
    try:
        # A pickle could run any code.
        with np.load(path, allow_pickle=False) as stored:
            missing = [key for key in _KEYS if key not in stored]
            if missing:
                raise UsageError(
                    f"{path}: needs the arrays {', '.join(_KEYS)}; it lacks {', '.join(missing)} "
                    f"and has {', '.join(stored.files)}"
                )
            train_x, train_y, test_x, test_y = (stored[key] for key in _KEYS)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: not a readable npz file ({error})") from error
    _check(path, train_x, train_y)
    _check(path, test_x, test_y)
    if train_x.shape[1:] != test_x.shape[1:]:
        raise UsageError(
            f"{path}: x_train and x_test must differ in their first axis only, got "
            f"{train_x.shape} and {test_x.shape}"
        )
    return _dataset(name, (train_x, train_y, test_x, test_y))
