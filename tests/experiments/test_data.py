import functools
import gzip
import hashlib
import http.server
import threading

import idx_files
import numpy as np
import pytest

from kldwrm_jax.experiments import data
from kldwrm_jax.experiments.data import download, read_idx
from kldwrm_jax.experiments.errors import UsageError


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "raw"])
@pytest.mark.parametrize("below", ["", "mnist"], ids=["in the folder", "in a folder of its name"])
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_files_of_the_user_are_read(compressed, below, by, tmp_path, monkeypatch):
    idx_files.write(tmp_path / below, compressed)
    if by == "variable":
        monkeypatch.setenv("KLDWRM_DATA", str(tmp_path))
    found = data.load("mnist", tmp_path if by == "argument" else None)
    expected = idx_files.arrays()["train-images-idx3-ubyte"]
    np.testing.assert_allclose(found.train_x[..., 0], expected / 255, rtol=1e-6)
    assert found.train_x.dtype == np.float32
    assert found.test_x.shape == (8, 6, 6, 1)
    assert found.train_y.tolist() == [i % 10 for i in range(24)]
    assert found.train_y.dtype == found.test_y.dtype == np.int32
    assert (found.mean, found.std) == (0.1307, 0.3081)


def test_a_missing_file_is_named(tmp_path):
    idx_files.write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte") as raised:
        data.load("mnist", tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "--data-dir or KLDWRM_DATA" in str(raised.value)


def test_labels_of_other_images_are_refused(tmp_path):
    idx_files.write(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(idx_files.encode(np.arange(7)))
    with pytest.raises(UsageError, match="7 labels for 8 images; delete it") as raised:
        data.load("mnist", tmp_path)
    assert str(labels) in str(raised.value)


def test_digits_come_without_a_download():
    digits = data.load("digits")
    assert digits.train_x.shape == (1347, 8, 8, 1)
    assert digits.test_x.shape == (450, 8, 8, 1)
    assert digits.train_x.dtype == np.float32
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 1)
    assert sorted(set(digits.test_y)) == list(range(10))
    assert digits.mean == pytest.approx(digits.train_x.mean())
    assert digits.std == pytest.approx(digits.train_x.std())


def test_an_unknown_name_gets_the_list():
    with pytest.raises(UsageError, match="digits, mnist"):
        data.load("minst")


CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Truncating(http.server.SimpleHTTPRequestHandler):
    """Serves files, but hangs up in the middle of those under /truncated/."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        if not self.path.startswith("/truncated/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder and the address it is served at."""
    folder = tmp_path_factory.mktemp("mirror")
    (folder / "good").mkdir()
    (folder / "good" / "file.gz").write_bytes(CONTENT)
    (folder / "wrong").mkdir()
    (folder / "wrong" / "file.gz").write_bytes(CONTENT[:-1] + b"x")
    handler = functools.partial(Truncating, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def url(served):
    return served[1]


def test_the_first_mirror_with_the_right_file_serves(url, tmp_path):
    mirrors = [f"{url}{name}/" for name in ("missing", "wrong", "truncated", "good")]
    mirrors.insert(0, "http://127.0.0.1:1/")  # nobody listens
    path = download("file.gz", mirrors, MD5, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["missing", "wrong", "truncated"])
def test_a_fault_leaves_nothing_in_the_cache_and_is_reported(fault, url, tmp_path):
    with pytest.raises(UsageError, match="--data-dir") as raised:
        download("file.gz", [f"{url}{fault}/"], MD5, tmp_path)
    assert f"{url}{fault}/file.gz" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_cache_is_not_downloaded_again(tmp_path):
    (tmp_path / "file.gz").write_bytes(CONTENT)
    path = download("file.gz", ["http://127.0.0.1:1/"], MD5, tmp_path)
    assert path.read_bytes() == CONTENT


def test_a_wrong_file_in_the_cache_is_replaced_or_refused_but_never_used(url, tmp_path):
    (tmp_path / "file.gz").write_bytes(b"planted")
    with pytest.raises(UsageError, match=r"file\.gz could not be downloaded"):
        download("file.gz", [f"{url}wrong/"], MD5, tmp_path)
    assert download("file.gz", [f"{url}good/"], MD5, tmp_path).read_bytes() == CONTENT


def test_without_a_folder_mnist_is_downloaded_once_into_the_users_cache(
    served, tmp_path, monkeypatch
):
    folder, url = served
    contents = idx_files.write(folder / "mnist")
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    monkeypatch.delenv("KLDWRM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "FILES", md5)
    monkeypatch.setattr(data, "MIRRORS", (f"{url}mnist/",))
    first = data.load("mnist")
    for name in contents:
        (folder / "mnist" / name).unlink()
        assert (tmp_path / "kldwrm_jax" / "mnist" / name).exists()
    np.testing.assert_array_equal(first.train_x, data.load("mnist").train_x)


def test_the_checksums_are_of_the_four_files():
    assert set(data.FILES) == {f"{name}.gz" for name in idx_files.arrays()}
    assert all(len(md5) == 32 for md5 in data.FILES.values())
    assert len(data.MIRRORS) > 1
    assert all(mirror.endswith("/") for mirror in data.MIRRORS)


IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
IDX = idx_files.encode(IMAGES)


@pytest.mark.parametrize("content", [IDX, gzip.compress(IDX, mtime=0)], ids=["raw", "gzip"])
def test_an_idx_file_is_read_as_written(content, tmp_path):
    path = tmp_path / "images"
    path.write_bytes(content)
    np.testing.assert_array_equal(read_idx(path, 3), IMAGES)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (IDX[:-1], "24 bytes expected .* found 23"),
        (IDX + b"\0", "24 bytes expected .* found 25"),
        (IDX[:7], "not an IDX file"),
        (b"", "not an IDX file"),
        (b"<html>not found, sorry</html>", "not an IDX file"),
        (idx_files.encode(IMAGES.reshape(4, 6)), "not an IDX file"),
        (gzip.compress(IDX, mtime=0)[:-9], "damaged gzip"),
        (gzip.compress(IDX, mtime=0)[:-8] + b"12345678", "damaged gzip"),
        (b"\x1f\x8b\x08" + b"\xff" * 40, "damaged gzip"),
    ],
    ids=[
        "a byte short",
        "a byte long",
        "half a header",
        "empty",
        "a web page",
        "another shape",
        "truncated gzip",
        "gzip with another checksum",
        "not gzip",
    ],
)
def test_a_damaged_file_is_named_with_the_fix(content, complaint, tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{complaint}.*; delete it and download it again") as e:
        read_idx(path, 3)
    assert str(path) in str(e.value)
