"""A run's Orbax checkpoint: complete, undamaged and of this very run, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from kldwrm_jax.experiments.errors import UsageError
from kldwrm_jax.experiments.provenance import fingerprint
from kldwrm_jax.experiments.runs import Record, check_same

_FIX = "delete it, and --resume restarts this run from its first epoch"
_OPTIONS = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)


class Checkpoints:
    """The newest checkpoint of the run that JSON describes as ``run``, in a folder of its own."""

    def __init__(self, folder: Path, run: Record) -> None:
        self.folder, self.run = folder, run
        self._manager = ocp.CheckpointManager(folder.absolute(), options=_OPTIONS)

    def save(self, state: Any, epochs: list[Record]) -> None:
        """Saves state and log; the previous checkpoint is deleted once this one is complete."""
        checksum = fingerprint((state, json.dumps(epochs)))
        about = {"run": self.run, "epochs": epochs, "sha256": checksum}
        items = {"about": ocp.args.JsonSave(about), "state": ocp.args.StandardSave(state)}
        self._manager.save(len(epochs), args=ocp.args.Composite(**items))

    def load(self, state: Any) -> tuple[Any, list[Record]]:
        """Loads state and log; without a checkpoint, ``state`` and an empty log."""
        if self._manager.latest_step() is None:
            return state, []
        about = self._restore("about", ocp.args.JsonRestore())
        check_same(self.folder, about["run"], self.run, f"move it to where it belongs, or {_FIX}")
        state = self._restore("state", ocp.args.StandardRestore(state))
        if fingerprint((state, json.dumps(about["epochs"]))) != about["sha256"]:
            raise UsageError(f"{self.folder} is damaged (checksum mismatch): {_FIX}")
        return state, about["epochs"]

    def _restore(self, name: str, args: Any) -> Any:
        try:
            step, items = self._manager.latest_step(), ocp.args.Composite(**{name: args})
            return self._manager.restore(step, args=items)[name]
        except Exception as error:  # Orbax raises many kinds
            raise UsageError(
                f"{self.folder} is damaged, or its state has another structure: {_FIX}\n{error}"
            ) from error

    def delete(self) -> None:
        """Deletes the folder."""
        self._manager.close()
        shutil.rmtree(self.folder)
