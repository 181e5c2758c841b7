"""Small data sets in MNIST's IDX format."""

import gzip

import numpy as np


def encode(array):
    """Encodes an array of bytes as IDX."""
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def arrays(train=24, test=8, side=6):
    """Random images and labels, by file name."""
    rng = np.random.default_rng(0)

    def images(count):
        return rng.integers(0, 256, (count, side, side))

    def labels(count):
        return np.arange(count) % 10

    return {
        "train-images-idx3-ubyte": images(train),
        "train-labels-idx1-ubyte": labels(train),
        "t10k-images-idx3-ubyte": images(test),
        "t10k-labels-idx1-ubyte": labels(test),
    }


def write(folder, compressed=True, **sizes):
    """Writes the four files; returns their contents by name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, array in arrays(**sizes).items():
        path = folder / (f"{name}.gz" if compressed else name)
        written[path.name] = gzip.compress(encode(array)) if compressed else encode(array)
        path.write_bytes(written[path.name])
    return written
