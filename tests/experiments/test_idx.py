import gzip

import idx_files
import numpy as np
import pytest

from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.idx import read_idx

IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
CONTENT = idx_files.encode(IMAGES)


@pytest.mark.parametrize("content", [CONTENT, gzip.compress(CONTENT)], ids=["raw", "gzip"])
def test_reads_what_was_written(content, tmp_path):
    path = tmp_path / "images"
    path.write_bytes(content)
    np.testing.assert_array_equal(read_idx(path, 3), IMAGES)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (CONTENT[:-1], "23 follow"),
        (CONTENT + b"\0", "25 follow"),
        (CONTENT[:7], "cut short"),
        (b"", "cut short"),
        (b"<html>not found, sorry</html>", "not an IDX file"),
        (idx_files.encode(IMAGES.reshape(4, 6)), "not an IDX file"),
        (gzip.compress(CONTENT)[:-9], "damaged gzip"),
        (gzip.compress(CONTENT)[:-8] + b"12345678", "damaged gzip"),
        (b"\x1f\x8b\x08" + b"\xff" * 40, "damaged gzip"),
    ],
    # Named, since compressed bytes have the time in them.
    ids=[
        "a byte short",
        "a byte long",
        "half a header",
        "empty",
        "a web page",
        "another shape",
        "gzip cut short",
        "gzip of another sum",
        "no gzip",
    ],
)
def test_a_damaged_file_is_named_and_not_believed(content, complaint, tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint) as raised:
        read_idx(path, 3)
    assert str(path) in str(raised.value)
