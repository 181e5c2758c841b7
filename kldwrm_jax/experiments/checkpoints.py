"""A run's checkpoint on disk: whole and of this very run, or refused.

Three parts: a line with the checksum of all that follows; a line of JSON that says which run and
epoch it is of; the arrays, in MessagePack, which holds data only: reading it runs no code.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from kldwrm_jax.experiments import runs
from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.paths import leaves_by_path

_KIND = b"kldwrm checkpoint, SHA-256 "


class Checkpoint(NamedTuple):
    """The state after an epoch."""

    state: Any
    epoch: int


def save(path: Path, checkpoint: Checkpoint, run: Mapping[str, Any]) -> None:
    """Writes a checkpoint in place of the one before, at once.

    Args:
      path: where.
      checkpoint: what to write.
      run: what the run depends on, as JSON has it.
    """
    about = {"run": run, "epoch": checkpoint.epoch, "version": metadata.version("kldwrm_jax")}
    arrays = flax.serialization.to_bytes(jax.device_get(checkpoint.state))
    content = json.dumps(about).encode() + b"\n" + arrays
    runs.replace(path, _KIND + _checksum(content) + b"\n" + content)


def load(path: Path, like: Any, run: Mapping[str, Any]) -> Checkpoint:
    """Reads a checkpoint.

    Args:
      path: where.
      like: a state of the structure, shapes and types that this program has.
      run: what the run depends on, as JSON has it.

    Raises:
      UsageError: if it is damaged, of another run, or of another structure; it says which.
    """
    way_out = "delete it, and --resume starts this run again from its first epoch"
    first, _, content = path.read_bytes().partition(b"\n")
    if first != _KIND + _checksum(content):
        raise UsageError(f"{path} is damaged, or no checkpoint of this program: {way_out}")
    second, _, arrays = content.partition(b"\n")
    about = json.loads(second)
    for name, value in run.items():
        if about["run"].get(name) != value:
            raise UsageError(
                f"{path} is of a run with {name} = {about['run'].get(name)!r}, not {value!r}: put "
                f"it back where it belongs, or {way_out}"
            )
    stored = flax.serialization.msgpack_restore(arrays)
    theirs, ours = _forms(stored), _forms(flax.serialization.to_state_dict(like))
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise UsageError(
                f"{path} was written by another version of the program ({about['version']}; this "
                f"is {metadata.version('kldwrm_jax')}): {name} is {theirs.get(name, 'missing')} "
                f"there and {ours.get(name, 'missing')} here. Resume with that version, or "
                f"{way_out}"
            )
    state = flax.serialization.from_state_dict(like, stored)
    return Checkpoint(jax.tree.map(jnp.asarray, state), about["epoch"])


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _forms(tree: Any) -> dict[str, str]:
    """Type and shape of every array, by its path."""
    return {
        path: f"{np.asarray(x).dtype}{list(np.shape(x))}"
        for path, x in leaves_by_path(tree).items()
    }
