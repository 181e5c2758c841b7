"""Stacks: copies of a layer in one array, as ``scan`` and ``vmap`` over layers keep them."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kldwrm_jax.curvature.layer_spec import Arrays, Shape


@dataclasses.dataclass(frozen=True)
class Stack:
    """The axes of an array that number copies of a layer."""

    at: int = 0  # the first of them; from the back if negative, as in variable_axes={"params": -1}
    lengths: tuple[int, ...] = ()  # the number of copies along each

    def axes(self, ndim: int) -> tuple[int, ...]:
        """The stack's axes in an array that has ``ndim`` axes with it."""
        first = self.at if self.at >= 0 else ndim + self.at
        return tuple(range(first, first + len(self.lengths)))

    def spread(self, x: jax.Array) -> jax.Array:
        """One copy's array, repeated for every copy."""
        return self.from_front(jnp.broadcast_to(x, self.lengths + x.shape))

    def to_front(self, x: jax.Array) -> jax.Array:
        """A stacked array with the stack's axes in front."""
        return jnp.moveaxis(x, self.axes(x.ndim), range(len(self.lengths)))

    def from_front(self, x: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_front`."""
        return jnp.moveaxis(x, range(len(self.lengths)), self.axes(x.ndim))

    def attach(self, arrays: Mapping[str, jax.Array], *, stacked: bool = False) -> Arrays:
        """Arrays as they travel beside the layer's parameters.

        They are those of one copy, for every copy; or ``stacked``, with the stack in front. Since
        the stack's axis may be the second from either end, every array is given at least two axes
        of its own, and its name says how many it had.
        """
        attached = {}
        for name, x in arrays.items():
            ndim = x.ndim - stacked * len(self.lengths)
            padded = x.reshape(x.shape + (1,) * max(0, 2 - ndim))
            attached[f"{name}.{ndim}"] = self.from_front(padded) if stacked else self.spread(padded)
        return attached

    def detach(self, attached: Mapping[str, jax.Array]) -> Arrays:
        """Attached arrays by their names, with the stack's axes in front."""
        arrays = {}
        for key, x in attached.items():
            name, _, ndim = key.rpartition(".")
            front = self.to_front(x)
            arrays[name] = front.reshape(front.shape[: len(self.lengths) + int(ndim)])
        return arrays


def find_stacks(inside: Mapping[str, Shape], outside: Mapping[str, Shape]) -> Sequence[Stack]:
    """Every stack by which the shapes inside a transformed call become those outside it."""
    pairs = [(inside[name], outside[name]) for name in inside]
    extra = {len(outer) - len(inner) for inner, outer in pairs}
    if len(extra) != 1:
        return []
    k = extra.pop()
    found = []
    for at in (0, 1, 2, -1, -2) if k == 1 else (0,):
        lengths, fits = set(), True
        for inner, outer in pairs:
            axes = Stack(at, (0,) * k).axes(len(outer))
            rest = tuple(n for axis, n in enumerate(outer) if axis not in axes)
            fits &= rest == inner
            lengths.add(tuple(outer[axis] for axis in axes) if fits else ())
        if fits and len(lengths) == 1:
            found.append(Stack(at, lengths.pop()))
    return found
