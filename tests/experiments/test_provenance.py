import re
import shutil
import subprocess
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.experiments import provenance


def test_a_record_holds_versions_revision_and_machine():
    found = provenance.record()
    assert set(found["versions"]) >= {"python", "jax", "jaxlib", "flax", "optax", "kldwrm_jax"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["processor"]
    assert set(found) == {"versions", "git_revision", "machine"}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the module in a repository."""
    file = tmp_path / "provenance.py"
    shutil.copy(provenance.__file__, file)
    monkeypatch.setattr(provenance, "__file__", str(file))

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    return file, git


def test_the_revision_is_that_of_the_commit_and_says_if_files_were_edited(copy):
    file, git = copy
    git("add", ".")
    git("commit", "-m", "first")
    assert provenance.git_revision() == git("rev-parse", "HEAD")
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.git_revision())
    file.write_text("edited")
    assert provenance.git_revision() == git("rev-parse", "HEAD") + "-dirty"


def test_an_installed_copy_in_another_repository_has_no_revision(copy):
    file, git = copy
    other = file.with_name("other")
    other.write_text("another project's file")
    git("add", "other")
    git("commit", "-m", "first")
    assert provenance.git_revision() is None


def test_without_git_there_is_no_revision(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.git_revision() is None


class Pair(NamedTuple):
    a: object
    b: object


def test_a_fingerprint_is_that_of_bits_types_shapes_and_names():
    base = {"x": jnp.arange(4.0), "y": None}
    different = [
        {"x": jnp.arange(4.0).at[0].set(-0.0), "y": None},
        {"x": jnp.arange(4), "y": None},
        {"x": jnp.arange(4.0).reshape(2, 2), "y": None},
        {"z": jnp.arange(4.0)},
        Pair(jnp.arange(4.0), None),
    ]
    found = [provenance.fingerprint(tree) for tree in (base, *different)]
    assert len(set(found)) == len(found)
    assert provenance.fingerprint({"x": np.arange(4.0, dtype=np.float32)}) == found[0]
