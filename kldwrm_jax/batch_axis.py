"""Named axes of ``pmap`` and ``shard_map`` over which a batch is split.

Each replica has a part of the batch, and the same parameters and state. They stay the same if
whatever is measured on the batch is that of the whole batch: sums over its examples are added up
over the replicas.

With ``shard_map(..., check_vma=True)``, JAX's types say over which axes a value varies. The
gradient by a value that does not vary is a sum over the replicas already; elsewhere it is each
replica's own. So what is summed here is first made to vary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BatchAxis:
    """The axes over which a batch is split.

    Args:
      names: of the axes. None if nobody has said; ``()`` if replicas are to be independent.
    """

    names: tuple[str, ...] | None = None

    @classmethod
    def named(cls, axis_name: Any) -> "BatchAxis":
        """From the argument ``axis_name`` of ``instrument``."""
        names = (axis_name,) if isinstance(axis_name, str) else axis_name
        if names is not None:
            if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
                raise ValueError(
                    f"axis_name must be the name of an axis of pmap or shard_map, a tuple of "
                    f"names, or None, got {axis_name!r}"
                )
            names = tuple(names)
        return cls(names)

    @property
    def size(self) -> int:
        """The number of replicas."""
        return jax.lax.axis_size(self.names) if self.names else 1

    def sum(self, tree: T) -> T:
        """The sum over the replicas."""
        return jax.lax.psum(self.varying(tree), self.names) if self.names else tree

    def mean(self, tree: Any) -> Any:
        """The mean over the replicas; what is not of a floating-point type stays as it is."""
        if not self.names:
            return tree
        return jax.tree.map(
            lambda x: (self.sum(x) / self.size).astype(x.dtype) if _is_float(x) else x, tree
        )

    def fold_in(self, key: jax.Array) -> jax.Array:
        """Another key for every replica."""
        if not self.names:
            return key
        return jax.random.fold_in(key, jax.lax.axis_index(self.names))

    def varying(self, tree: T) -> T:
        """The same, with a gradient that is each replica's own."""
        return vary(tree, self.names) if self._is_tracked else tree

    def averaging_gradient(self, tree: T) -> T:
        """The same, with a gradient that is the mean over the replicas."""
        if not self.names or self._is_tracked:
            return tree  # where JAX tracks what varies, it adds the replicas' gradients up

        @jax.custom_jvp
        def identity(x: jax.Array) -> jax.Array:
            return x

        @identity.defjvp
        def rule(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
            return primals[0], jax.lax.pmean(tangents[0], self.names)

        return jax.tree.map(lambda x: identity(x) if _is_float(x) else x, tree)

    def bound(self, function: Callable[[], T]) -> T:
        """What a function returns, called where the axes are known, with a single replica."""
        results: list[T] = []

        def run(names: tuple[str, ...]) -> None:
            if not names:
                results.append(function())
                return
            jax.vmap(lambda _: run(names[1:]), None, None, axis_name=names[0], axis_size=1)(0)

        run(self.names or ())
        return results[0]

    def check(self, params: Any, batch: Any) -> None:
        """An error if the axes are not known here, or if anything is split over another."""
        _check_not_explicit(params, batch)
        if self.names is None:
            self._check_not_split(params, batch)
            return
        try:
            _ = self.size
        except NameError as error:
            raise ValueError(
                f"axis_name={self.names!r} was given to instrument, and here it is not bound: call "
                f"this inside jax.pmap(..., axis_name=...) or jax.shard_map over that axis, or use "
                f"a net = instrument(...) without axis_name"
            ) from error

    def _check_not_split(self, params: Any, batch: Any) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        # An axis of pmap that the user has not named can not be averaged over: replicas are
        # independent.
        split = [
            name
            for name in mesh.manual_axes
            if mesh.shape[name] > 1 and not str(name).startswith(("_", "<"))
        ]
        if any(_is_tracked(name) for name in split):
            own = {name for x in jax.tree.leaves(params) for name in _varying_over(x)}
            theirs = {name for x in jax.tree.leaves(batch) for name in _varying_over(x)}
            split = [name for name in split if name in theirs - own]
        if split:
            name = split[0] if len(split) == 1 else tuple(split)
            raise ValueError(
                f"the batch is split over {name!r} by pmap or shard_map, and each replica would "
                f"keep statistics of its own: pass instrument(..., axis_name={name!r}) to average "
                f"over the replicas, or axis_name=() if they are independent, such as seeds"
            )

    @property
    def _is_tracked(self) -> bool:
        """Whether JAX's types say what varies over the axes: ``shard_map(check_vma=True)``."""
        return bool(self.names) and any(_is_tracked(name) for name in self.names or ())


def _check_not_explicit(params: Any, batch: Any) -> None:
    """Arrays whose type has a sharding would need one for every sum over examples."""
    for what, tree in (("parameters are", params), ("batch is", batch)):
        explicit = {name for x in jax.tree.leaves(tree) for name in _explicit_axes(x)}
        if explicit:
            raise ValueError(
                f"the {what} sharded over {sorted(explicit)}, axes of a mesh of type Explicit: "
                f"make it by jax.make_mesh(..., axis_types=(AxisType.Auto, ...)), and leave out "
                f"the out_sharding of the model's layers, which belongs to Explicit axes"
            )


def _explicit_axes(x: Any) -> set[str]:
    """The axes of type Explicit over which an array is sharded."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return set()
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    names = jax.tree.leaves(tuple(sharding.spec))
    return {name for name in names if types.get(name) == jax.sharding.AxisType.Explicit}


def vary(tree: T, names: Any) -> T:
    """The same values, of a type that varies over these axes."""

    def cast(x: Any) -> Any:
        new = tuple(name for name in names if name not in _varying_over(x))
        if not new or not hasattr(x, "dtype"):
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, new, to="varying")
        return jax.lax.pvary(x, new)  # type: ignore[attr-defined]  # JAX before 0.8.2

    return jax.tree.map(cast, tree)


def zeros(likes: Any) -> Any:
    """Zeros of given shapes and types, such as ``jax.eval_shape`` tells: what a sum begins with."""
    return jax.tree.map(
        lambda like: vary(jnp.zeros(like.shape, like.dtype), _varying_axes(like)), likes
    )


def vary_like(x: jax.Array, like: Any) -> jax.Array:
    """``x``, varying over the axes that a type varies over."""
    return vary(x, _varying_axes(like))


def _is_tracked(name: str) -> bool:
    return bool(_varying_over(jax.lax.axis_index(name)))


def _varying_over(x: Any) -> frozenset[str]:
    return _varying_axes(jax.typeof(x)) if isinstance(x, jax.Array) else frozenset()


def _varying_axes(kind: Any) -> frozenset[str]:
    """Of the type of an array."""
    manual = getattr(kind, "manual_axis_type", None)
    if manual is not None:
        return manual.varying
    return getattr(kind, "vma", None) or frozenset()  # its name in older versions of JAX


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
