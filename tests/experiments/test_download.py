import functools
import hashlib
import http.server
import threading

import pytest

from kldwrm_jax.experiments.download import fetch
from kldwrm_jax.experiments.errors import UsageError

CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Shortening(http.server.SimpleHTTPRequestHandler):
    """Serves files, but hangs up in the middle of those under /short/."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        if not self.path.startswith("/short/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirror")
    (folder / "good").mkdir()
    (folder / "good" / "file.gz").write_bytes(CONTENT)
    (folder / "wrong").mkdir()
    (folder / "wrong" / "file.gz").write_bytes(CONTENT[:-1] + b"x")
    handler = functools.partial(Shortening, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}/"
        served.shutdown()
        thread.join()


def no_progress(done, total):
    pass


def test_the_first_mirror_with_the_right_file_serves(server, tmp_path):
    mirrors = [f"{server}{name}/" for name in ("missing", "wrong", "short", "good")]
    mirrors.insert(0, "http://127.0.0.1:1/")  # nobody listens
    path = fetch("file.gz", mirrors, MD5, tmp_path / "cache", no_progress)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["missing", "wrong", "short"])
def test_a_fault_leaves_nothing_in_the_cache_and_is_told(fault, server, tmp_path):
    with pytest.raises(UsageError, match="--data-dir") as raised:
        fetch("file.gz", [f"{server}{fault}/"], MD5, tmp_path, no_progress)
    assert f"{server}{fault}/file.gz" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_in_the_cache(server, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("file.gz", [f"{server}good/"], MD5, tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_to_the_whole(server, tmp_path):
    told = []
    fetch("file.gz", [f"{server}good/"], MD5, tmp_path, lambda *args: told.append(args))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert len(told) > 1


def test_a_file_in_the_cache_is_not_fetched_again(tmp_path):
    (tmp_path / "file.gz").write_bytes(CONTENT)
    assert fetch("file.gz", [], MD5, tmp_path, no_progress).read_bytes() == CONTENT


def test_a_wrong_file_in_the_cache_is_replaced_or_refused_but_never_used(server, tmp_path):
    (tmp_path / "file.gz").write_bytes(b"planted")
    with pytest.raises(UsageError, match=r"file\.gz could not be downloaded"):
        fetch("file.gz", [f"{server}wrong/"], MD5, tmp_path, no_progress)
    path = fetch("file.gz", [f"{server}good/"], MD5, tmp_path, no_progress)
    assert path.read_bytes() == CONTENT
