"""With what, and where, a result was made; and a fingerprint to know it by."""

import hashlib
import os
import platform
from importlib import metadata
from typing import Any

import jax
import numpy as np

from kldwrm_jax.paths import leaves_by_path

# What sets the threads and the memory of a process before it starts.
_VARIABLES = (
    "XLA_FLAGS",
    "OPENBLAS_NUM_THREADS",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "kldwrm_jax", "kfac-jax")


def versions() -> dict[str, str]:
    """Versions of Python, and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The machine, as far as it says anything about a time."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def fingerprint(tree: Any) -> str:
    """SHA-256 of a tree's arrays, their names, types and shapes: equal if they are, to the bit."""
    digest = hashlib.sha256()
    for path, leaf in leaves_by_path(tree).items():
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
            return next(names, platform.processor())
    except OSError:
        return platform.processor()
