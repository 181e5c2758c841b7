"""What a result was made with: versions, git revision, machine, and a fingerprint of arrays."""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "kldwrm_jax")
_VARIABLES = ("XLA_FLAGS", "OPENBLAS_NUM_THREADS")  # they set the threads of a process


def record() -> dict[str, Any]:
    """Versions, git revision and machine, to be stored with a result."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    machine = {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(getattr(os, "sched_getaffinity", lambda _: ())(0)) or None,
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    versions = {package: metadata.version(package) for package in _PACKAGES}
    versions["python"] = platform.python_version()
    return {"versions": versions, "git_revision": git_revision(), "machine": machine}


def git_revision() -> str | None:
    """The commit of the checkout this runs from, "-dirty" if edited; None for an installed copy."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
    try:  # an installed package may lie, untracked, in another project's repository
        subprocess.run(tracked, check=True, capture_output=True)
        return subprocess.check_output(describe, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def fingerprint(tree: Any) -> str:
    """SHA-256 of a tree's arrays, paths, types and shapes: equal if and only if all bits are."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
