import contextlib
import dataclasses
import hashlib
import pickle

import idx_files
import numpy as np
import pytest

from kldwrm_jax.experiments import data
from kldwrm_jax.experiments.errors import UsageError


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "raw"])
@pytest.mark.parametrize("below", ["", "mnist"], ids=["in the folder", "in a folder of its name"])
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_files_that_the_user_has_are_read(compressed, below, by, tmp_path, monkeypatch):
    idx_files.write(tmp_path / below, compressed)
    if by == "variable":
        monkeypatch.setenv("KLDWRM_DATA", str(tmp_path))
    found = data.load("mnist", tmp_path if by == "argument" else None)
    expected = idx_files.arrays()["train-images-idx3-ubyte"]
    np.testing.assert_allclose(found.train_x[..., 0], expected / 255, rtol=1e-6)
    assert found.train_x.dtype == np.float32
    assert found.test_x.shape == (8, 6, 6, 1)
    assert found.train_y.tolist() == [i % 10 for i in range(24)]
    assert (found.mean, found.std) == (0.1307, 0.3081)
    assert found.classes == 10


@pytest.fixture
def mirrored(tmp_path, monkeypatch):
    """Fashion-MNIST from a mirror that is a folder, with the checksums of its files."""
    monkeypatch.delenv("KLDWRM_DATA", raising=False)
    mirror = tmp_path / "mirror"
    md5 = {name: hashlib.md5(c).hexdigest() for name, c in idx_files.write(mirror).items()}
    remote = dataclasses.replace(
        data.REMOTES["fashion-mnist"], mirrors=(f"{mirror.as_uri()}/",), md5=md5
    )
    monkeypatch.setitem(data.REMOTES, "fashion-mnist", remote)
    monkeypatch.setattr(data, "cache_folder", lambda name: tmp_path / "cache" / name)
    return tmp_path


def test_a_download_is_kept_for_the_next_time(mirrored):
    first = data.load("fashion-mnist")
    for path in (mirrored / "mirror").iterdir():
        path.unlink()
    again = data.load("fashion-mnist")
    np.testing.assert_array_equal(first.train_x, again.train_x)
    assert first.mean == pytest.approx(first.train_x.mean())


def test_a_mirror_without_the_files_is_an_error_that_says_what_to_do(mirrored):
    (mirrored / "mirror" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="KLDWRM_DATA"):
        data.load("fashion-mnist")


def test_the_checksums_are_of_four_files_each():
    for remote in data.REMOTES.values():
        assert set(remote.md5) == {f"{name}.gz" for name in idx_files.arrays()}
        assert all(len(md5) == 32 for md5 in remote.md5.values())
        assert len(remote.mirrors) > 1
        assert all(mirror.endswith("/") for mirror in remote.mirrors)


def test_a_missing_file_is_named(tmp_path):
    idx_files.write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte") as raised:
        data.load("mnist", tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_labels_of_other_images_are_refused(tmp_path):
    idx_files.write(tmp_path)
    labels = idx_files.encode(np.arange(7))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(labels)
    with pytest.raises(UsageError, match="7 labels for 8 inputs"):
        data.load("mnist", tmp_path)


def test_digits_come_without_a_download():
    digits = data.load("digits")
    assert digits.train_x.shape == (1347, 8, 8, 1)
    assert digits.test_x.shape == (450, 8, 8, 1)
    assert digits.train_x.min() == 0
    assert digits.train_x.max() == 1
    assert digits.classes == 10


ARRAYS = {
    "x_train": np.arange(12.0).reshape(6, 2),
    "y_train": np.arange(6) % 3,
    "x_test": np.ones((2, 2)),
    "y_test": np.array([0, 2]),
}


def test_an_npz_file_gives_a_data_set_of_ones_own(tmp_path):
    np.savez(tmp_path / "own.npz", **ARRAYS)
    own = data.load(f"npz:{tmp_path / 'own.npz'}")
    np.testing.assert_array_equal(own.train_x, ARRAYS["x_train"])
    assert own.classes == 3
    assert own.mean == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"y_test": None}, "lacks y_test"),
        ({"y_test": np.array([0.5, 1.0])}, "whole numbers"),
        ({"y_test": np.array([-1, 1])}, "whole numbers"),
        ({"y_train": np.zeros(5, int)}, "5 labels for 6 inputs"),
        ({"x_test": np.ones((2, 3))}, "first axis only"),
        ({"x_train": np.full((6, 2), np.nan)}, "inputs must be finite numbers"),
        ({"x_test": np.array([["a", "b"], ["c", "d"]])}, "inputs must be finite numbers"),
    ],
)
def test_an_npz_file_that_does_not_fit_is_refused(change, complaint, tmp_path):
    arrays = {k: v for k, v in {**ARRAYS, **change}.items() if v is not None}
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(UsageError, match=complaint):
        data.load(f"npz:{tmp_path / 'own.npz'}")


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_an_npz_file_that_is_none_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"own\.npz"):
        data.load(f"npz:{tmp_path / 'own.npz'}")


class Malicious:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("form", ["an array in an archive", "an array", "a pickle"])
def test_a_pickle_in_the_data_is_refused_and_not_run(form, tmp_path):
    path, trace = tmp_path / "own.npz", tmp_path / "was run"
    objects = np.array([Malicious(trace)] * 6, object)
    with path.open("wb") as file:
        if form == "an array in an archive":
            np.savez(file, **ARRAYS | {"x_train": objects})
        elif form == "an array":
            np.save(file, objects)
        else:
            pickle.dump(Malicious(trace), file)
    with pytest.raises(UsageError, match=r"own\.npz: not a readable npz file"):
        data.load(f"npz:{path}")
    assert not trace.exists()
    with contextlib.suppress(TypeError, IndexError):  # the trap is one: whoever allows it falls in
        np.load(path, allow_pickle=True)["x_train"]
    assert trace.exists()


def test_an_array_that_is_no_archive_is_refused(tmp_path):
    with (tmp_path / "own.npz").open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(UsageError, match="not a readable npz file"):
        data.load(f"npz:{tmp_path / 'own.npz'}")


def test_an_unknown_name_gets_the_list():
    with pytest.raises(UsageError, match="digits, mnist, fashion-mnist, npz:PATH"):
        data.load("minst")
