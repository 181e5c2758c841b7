"""Parameters: where they sit in the model, and how they are read as matrices."""

import dataclasses
import math

import jax
import jax.numpy as jnp

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """How an array is read as a matrix of inputs x outputs, or as one matrix per group.

    Args:
      shape: the array's shape, with an axis that holds both groups and features split in two.
      group_axes: axes of ``shape`` that number independent matrices (groups of a convolution).
      input_axes: axes of ``shape`` that make up the rows, slowest first.
      output_axes: axes of ``shape`` that make up the columns, slowest first.
    """

    shape: tuple[int, ...]
    group_axes: Axes = ()
    input_axes: Axes = ()
    output_axes: Axes = ()

    @property
    def inputs(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[axis] for axis in self.input_axes)

    @property
    def outputs(self) -> int:
        """Number of columns."""
        return math.prod(self.shape[axis] for axis in self.output_axes)

    @property
    def groups(self) -> tuple[int, ...]:
        """``(number of groups,)``, or ``()`` for a single matrix."""
        count = math.prod(self.shape[axis] for axis in self.group_axes)
        return (count,) if self.group_axes else ()

    def read(self, x: jax.Array, stack: tuple[int, ...] = ()) -> jax.Array:
        """``(*stack, *array)`` as ``(*stack, [groups,] inputs, outputs)``."""
        x = x.reshape(stack + self.shape).transpose(self._order(len(stack)))
        return x.reshape(*stack, *self.groups, self.inputs, self.outputs)

    def write(self, m: jax.Array, stack: tuple[int, ...] = ()) -> jax.Array:
        """The inverse of :meth:`read`, up to a reshape."""
        order = self._order(len(stack))
        m = m.reshape([(stack + self.shape)[axis] for axis in order])
        return m.transpose(sorted(range(len(order)), key=order.__getitem__))

    def _order(self, stacked: int) -> Axes:
        own = self.group_axes + self.input_axes + self.output_axes
        return (*range(stacked), *(stacked + axis for axis in own))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Where a parameter sits in the model, and how it is read as a matrix.

    Args:
      path: its place in the parameters, ``"path/to/layer/kernel"``.
      shape: its shape.
      stack: the axes along which independent copies of the layer are stacked.
      view: one copy as a matrix; unused by a diagonal block.
    """

    path: str
    shape: tuple[int, ...]
    stack: Axes = ()
    view: MatrixView = MatrixView(())

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> tuple[int, ...]:
        """Lengths of the stack."""
        return tuple(self.shape[axis] for axis in self.stack)

    def to_matrix(self, x: jax.Array) -> jax.Array:
        """The parameter as ``(*stack, [groups,] inputs, outputs)``."""
        return self.view.read(jnp.moveaxis(x, self.stack, range(len(self.stack))), self.stacked)

    def from_matrix(self, m: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_matrix`."""
        x = self.view.write(m, self.stacked).reshape(self.stacked + self._own)
        return jnp.moveaxis(x, range(len(self.stack)), self.stack)

    @property
    def slice_size(self) -> int:
        """Number of entries of one copy."""
        return self.size // math.prod(self.stacked)

    def to_vector(self, x: jax.Array) -> jax.Array:
        """The parameter as ``(*stack, entries)``."""
        return jnp.moveaxis(x, self.stack, range(len(self.stack))).reshape(*self.stacked, -1)

    def from_vector(self, v: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_vector`."""
        return jnp.moveaxis(v.reshape(self.stacked + self._own), range(len(self.stack)), self.stack)

    @property
    def _own(self) -> tuple[int, ...]:
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.stack)

    def per_slice(self, x: jax.Array) -> Axes:
        """The axes of one copy of the layer: all but the stack."""
        return tuple(axis for axis in range(x.ndim) if axis not in self.stack)
