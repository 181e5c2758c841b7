"""A checkpoint is complete, undamaged and of this very run, or it is refused with a reason."""

import pickle
import re
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kldwrm_jax.experiments.checkpoints import Checkpoints
from kldwrm_jax.experiments.errors import UsageError

RUN = {"seed": 3, "model": "mlp", "setting": {"optimizer": "q", "arguments": {"rho": 0.5}}}
LOG = [{"epoch": 1, "train_loss": None}, {"epoch": 2, "train_loss": 0.1}]


class State(NamedTuple):
    params: dict
    momentum: dict | None
    count: jax.Array


def state(value, width=3):
    kernel = value + jnp.arange(2.0 * width).reshape(2, width) / 7
    return State({"kernel": kernel}, None, jnp.array(7, jnp.int32))


@pytest.fixture
def stored(tmp_path):
    folder = tmp_path / "seed-3.checkpoint"
    Checkpoints(folder, RUN).save(state(1.5), LOG)
    return folder


def test_what_is_saved_is_loaded(stored):
    found, log = Checkpoints(stored, RUN).load(state(0.0))
    assert log == LOG
    assert jax.tree.structure(found) == jax.tree.structure(state(0.0))
    jax.tree.map(np.testing.assert_array_equal, found, state(1.5))


def test_without_a_checkpoint_a_run_starts_with_an_empty_log(tmp_path):
    given = state(2.5)
    found, log = Checkpoints(tmp_path / "none", RUN).load(given)
    assert found is given
    assert log == []


def test_the_newest_checkpoint_is_kept_alone(stored):
    checkpoints = Checkpoints(stored, RUN)
    checkpoints.save(state(2.5), [*LOG, {"epoch": 3}])
    assert [path.name for path in stored.iterdir()] == ["3"]
    found, log = Checkpoints(stored, RUN).load(state(0.0))
    assert len(log) == 3
    np.testing.assert_array_equal(found.params["kernel"], state(2.5).params["kernel"])
    checkpoints.delete()
    assert not stored.exists()


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def complaint_of(folder):
    """The error that a damaged checkpoint gets; None if it loads as it was saved."""
    try:
        found, log = Checkpoints(folder, RUN).load(state(0.0))
    except UsageError as error:
        return str(error)
    assert log == LOG
    jax.tree.map(np.testing.assert_array_equal, found, state(1.5))
    return None


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "deleted"])
def test_damage_to_any_file_is_reported_or_harmless(damage, stored, tmp_path):
    """Harmless damage is to files that hold no numbers, such as times and shardings."""
    refused = set()
    for file in files(stored):
        copy = tmp_path / "copy"
        shutil.copytree(stored, copy)
        damaged, content = copy / file.relative_to(stored), file.read_bytes()
        if damage == "deleted":
            damaged.unlink()
        else:
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            cuts = {"truncated": content[:-1], "emptied": b"", "changed": flipped}
            damaged.write_bytes(cuts[damage])
        complaint = complaint_of(copy)
        if complaint is not None:
            assert re.search(r"copy (is damaged|belongs to).*delete it", complaint)
            refused.add(file.relative_to(stored).parts[1])
        shutil.rmtree(copy)
    assert refused >= {"about", "state"}


def test_a_changed_number_is_reported(stored):
    """Orbax itself would load it."""
    about = Checkpoints(stored, RUN)._restore("about", ocp.args.JsonRestore())
    shutil.rmtree(stored)
    checkpoints = Checkpoints(stored, RUN)
    items = {"about": ocp.args.JsonSave(about), "state": ocp.args.StandardSave(state(1.25))}
    checkpoints._manager.save(2, args=ocp.args.Composite(**items))
    with pytest.raises(UsageError, match=r"seed-3\.checkpoint is damaged \(checksum.*delete it"):
        checkpoints.load(state(0.0))


def test_a_pickle_is_refused_and_not_run(stored, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (open, (str(tmp_path / "run"), "w"))

    for file in files(stored):
        file.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UsageError, match="is damaged"):
        Checkpoints(stored, RUN).load(state(0.0))
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
    with pytest.raises(UsageError, match=f"{complaint}.*move it.*or delete it"):
        Checkpoints(stored, RUN | change).load(state(0.0))


@pytest.mark.parametrize(
    "like",
    [
        state(0.0, width=4),
        state(0.0)._replace(count=jnp.zeros((), jnp.int16)),
        state(0.0)._replace(momentum={"kernel": jnp.zeros(2)}),
        state(0.0)._replace(count=None),
    ],
    ids=["shape", "type", "more", "less"],
)
def test_a_checkpoint_of_another_structure_is_refused(like, stored):
    with pytest.raises(UsageError, match=r"seed-3\.checkpoint is damaged.*delete it"):
        Checkpoints(stored, RUN).load(like)


def test_a_save_that_was_killed_leaves_the_last_complete_checkpoint(stored):
    """A kill leaves some of the next one's files under a temporary name."""
    half = stored / "3.orbax-checkpoint-tmp"
    shutil.copytree(stored / "2", half)
    for file in files(half):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert complaint_of(stored) is None
    checkpoints = Checkpoints(stored, RUN)
    checkpoints.save(state(3.5), [*LOG, {"epoch": 3}])
    found, _ = Checkpoints(stored, RUN).load(state(0.0))
    np.testing.assert_array_equal(found.params["kernel"], state(3.5).params["kernel"])
