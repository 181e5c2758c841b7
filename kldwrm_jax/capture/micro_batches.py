"""A batch that is seen a part at a time: the memory of one part, the statistics of them all."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.curvature.blocks import Factors


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class SplitOracle(Oracle):
    """An oracle that goes through its batch in ``parts``, one after another.

    A part takes every so-manieth example, so that parts of a batch that is sharded over devices are
    sharded as it is.

    Args:
      parts: how many.
      after: other variables after a pass, if one was done: their mean over the parts.
    """

    parts: int = 1
    after: Any = None

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """As of every oracle; the number of parts is structure."""
        children, aux = super().tree_flatten()
        return (*children, self.after), (*aux, self.parts)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> "SplitOracle":
        """The oracle again, whatever its leaves have become."""
        return cls(*aux[:-1], *children[:-1], aux[-1], children[-1])  # type: ignore[call-arg]

    def factors(self) -> dict[str, Factors]:
        """Every block's curvature on the whole batch: the mean over its parts."""
        return self._mean(lambda part: part.factors())

    def value_and_grad(self) -> tuple[jax.Array, Any, "SplitOracle"]:
        """Loss and gradient, and the oracle with the other variables after the pass."""

        def one(part: Oracle) -> tuple[jax.Array, Any, Any]:
            loss, gradient, done = part.value_and_grad()
            return loss, gradient, done.variables

        loss, gradient, variables = self._mean(one)
        return loss, gradient, dataclasses.replace(self, after=variables)

    @property
    def variables(self) -> dict[str, Any]:
        """The collections given as ``variables`` after the pass: their mean over the parts."""
        return super().variables if self.after is None else self.after

    def outputs(self, params: Any) -> jax.Array:
        """The network's outputs on the whole batch; a gradient of them keeps one part's in mind."""

        @jax.checkpoint
        def one(params: Any, i: jax.Array) -> jax.Array:
            return self._part(i).outputs(params)

        stacked = jax.lax.map(lambda i: one(params, i), jnp.arange(self.parts))
        return jnp.swapaxes(stacked, 0, 1).reshape(-1, *stacked.shape[2:])

    @property
    def _batch(self) -> int:
        """How many examples there are: the outputs' first axis, and that of all they go with."""
        known = self.weights if self.targets is None else self.targets
        if known is None:
            known = jax.eval_shape(self.model.outputs, self.params, self.call)
        batch = jnp.shape(known)[0]
        if batch % self.parts:
            raise ValueError(
                f"micro_batches must divide the batch of {batch} examples, got {self.parts}"
            )
        if self.weights is not None and self.weights.shape[0] != batch:
            raise ValueError(
                f"weights must have the shape of the outputs without the likelihood's event axes, "
                f"of which the first are {batch} examples, got {self.weights.shape}"
            )
        return batch

    def _part(self, i: jax.Array) -> Oracle:
        batch = self._batch

        def cut(x: Any) -> Any:
            if jnp.ndim(x) == 0 or jnp.shape(x)[0] != batch:
                return x
            x = jnp.asarray(x)
            return x.reshape(batch // self.parts, self.parts, *x.shape[1:])[:, i]

        def another(x: Any) -> Any:
            return _folded(x, i) if _is_key(x) else x

        def another_stream(x: Any) -> Any:
            return _folded(x, i) if _is_key(x) or _is_raw_key(x) else x

        call = dataclasses.replace(
            self.call,
            args=jax.tree.map(cut, self.call.args),
            kwargs=jax.tree.map(cut, self.call.kwargs),
            variables=jax.tree.map(another, self.call.variables),
            rngs=jax.tree.map(another_stream, self.call.rngs),
        )
        return Oracle(
            self.model,
            self.likelihood,
            self.fisher,
            self.params,
            call,
            cut(self.targets) if self.targets is not None else None,
            None if self.key is None else _folded(self.key, i),
            cut(self.weights) if self.weights is not None else None,
        )

    def _mean(self, function: Callable[[Oracle], Any]) -> Any:
        """Over the parts, each by its share of the weights."""

        def share(part: Oracle) -> jax.Array:
            if self.weights is None or part.weights is None:
                return jnp.asarray(1 / self.parts)
            return part.weights.sum() / self.weights.sum()

        def add(total: Any, i: jax.Array) -> tuple[Any, None]:
            part = self._part(i)
            own = share(part)

            def plus(x: jax.Array, new: jax.Array) -> jax.Array:
                if not jnp.issubdtype(new.dtype, jnp.floating):
                    return new  # a counter, a key
                return x + jnp.where(own == 0, 0, own * new).astype(new.dtype)

            return jax.tree.map(plus, total, function(part)), None

        likes = jax.eval_shape(function, self._part(jnp.zeros((), int)))
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)
        return jax.lax.scan(add, zeros, jnp.arange(self.parts))[0]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_raw_key(x: Any) -> bool:
    """Whether this may be a key of ``jax.random.PRNGKey``, where a key is expected."""
    return jnp.ndim(x) == 1 and jnp.asarray(x).dtype == jnp.uint32


def _folded(key: jax.Array, i: jax.Array) -> jax.Array:
    """Another key for every part; of a stack of keys, each."""
    if jnp.ndim(key) == 0 or _is_raw_key(key):
        return jax.random.fold_in(key, i)
    return jax.vmap(lambda own: _folded(own, i))(key)
