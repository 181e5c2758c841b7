"""A checkpoint is whole and of this very run, or it is refused with a reason."""

import pickle
from importlib import metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.experiments import checkpoints, runs
from kldwrm_jax.experiments.checkpoints import Checkpoint
from kldwrm_jax.experiments.errors import UsageError

RUN = {"seed": 3, "model": "mlp", "setting": {"optimizer": "q", "arguments": {"rho": 0.5}}}


class State(NamedTuple):
    params: dict
    momentum: dict | None
    count: jax.Array


def state(value, width=3):
    return State({"kernel": jnp.full((2, width), value)}, None, jnp.array(7, jnp.int32))


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "seed-3.checkpoint"
    checkpoints.save(path, Checkpoint(state(1.5), 4), RUN)
    return path


def test_what_is_saved_is_loaded(stored):
    found = checkpoints.load(stored, state(0.0), RUN)
    assert found.epoch == 4
    assert jax.tree.structure(found.state) == jax.tree.structure(state(0.0))
    jax.tree.map(np.testing.assert_array_equal, found.state, state(1.5))


def test_every_truncation_is_refused(stored):
    whole = stored.read_bytes()
    for length in range(len(whole)):
        stored.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"seed-3\.checkpoint is damaged.*delete it"):
            checkpoints.load(stored, state(0.0), RUN)


def test_every_changed_byte_is_refused(stored):
    whole = stored.read_bytes()
    for place in range(len(whole)):
        stored.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UsageError, match="is damaged"):
            checkpoints.load(stored, state(0.0), RUN)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"garbage", bytes(1000)])
def test_what_is_no_checkpoint_is_refused(content, stored):
    stored.write_bytes(content)
    with pytest.raises(UsageError, match="no checkpoint of this program"):
        checkpoints.load(stored, state(0.0), RUN)


def test_a_pickle_is_refused_and_not_run(stored, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (open, (str(tmp_path / "run"), "w"))

    stored.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UsageError, match="is damaged"):
        checkpoints.load(stored, state(0.0), RUN)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "cnn"}, "model = 'mlp', not 'cnn'"),
        ({"seed": 4}, "seed = 3, not 4"),
        ({"setting": {"optimizer": "kfac"}}, "setting = .*'optimizer': 'q'.*, not .*'kfac'"),
        ({"data_sha256": "abc"}, "data_sha256 = None, not 'abc'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(change, complaint, stored):
    with pytest.raises(UsageError, match=f"{complaint}.*put it back.*or delete it"):
        checkpoints.load(stored, state(0.0), RUN | change)


@pytest.mark.parametrize(
    ("like", "complaint"),
    [
        (state(0.0, width=4), r"params/kernel is float32\[2, 3\] there and float32\[2, 4\] here"),
        (
            state(0.0)._replace(count=jnp.zeros((), jnp.int16)),
            r"count is int32\[\] there and int16\[\] here",
        ),
        (
            state(0.0)._replace(momentum={"kernel": jnp.zeros(2)}),
            r"momentum/kernel is missing there and float32\[2\] here",
        ),
        (state(0.0)._replace(count=None), r"count is int32\[\] there and missing here"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_by_what_differs(like, complaint, stored):
    version = metadata.version("kldwrm_jax")
    with pytest.raises(UsageError, match=complaint) as raised:
        checkpoints.load(stored, like, RUN)
    assert f"this is {version}" in str(raised.value)
    assert "Resume with that version, or delete it" in str(raised.value)


def test_a_write_that_was_killed_leaves_the_last_whole_checkpoint(stored, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    left = stored.with_name(f".{stored.name}.part")
    with monkeypatch.context() as patched:
        patched.setattr(runs.Path, "unlink", lambda *_, **__: None)  # SIGKILL tidies nothing
        patched.setattr(runs.os, "fsync", killed)
        with pytest.raises(Killed):
            checkpoints.save(stored, Checkpoint(state(2.5), 5), RUN)
    assert left.exists()
    assert checkpoints.load(stored, state(0.0), RUN).epoch == 4
    checkpoints.save(stored, Checkpoint(state(3.5), 6), RUN)
    assert checkpoints.load(stored, state(0.0), RUN).epoch == 6
    assert list(stored.parent.iterdir()) == [stored]
