"""A batch that is seen a part at a time: the memory of one part, the statistics of them all."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.arguments import Scalar
from kldwrm_jax.batch_axis import zeros
from kldwrm_jax.capture.captured_layer import Bases
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.curvature.blocks import Factors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SplitOracle(Oracle):
    """An oracle that goes through its batch in parts, one after another.

    Part i of n has the examples i, i + n, i + 2n, ...: the parts of a batch that is sharded over
    devices are sharded in the same way.
    """

    parts: int = dataclasses.field(default=1, metadata={"static": True})

    def _factors_by_term(self, bases: Bases) -> list[dict[str, Factors]]:
        """Of every term on the whole batch: the mean over its parts."""
        return self._mean(lambda part: part._factors_by_term(bases))

    def _value_and_grad_here(self) -> tuple[jax.Array, Any, Any]:
        """Of all parts, before replicas exchange anything; other variables are the parts' mean."""
        return self._mean(lambda part: part._value_and_grad_here())

    def outputs(self, params: Any) -> Any:
        """The network's outputs on the whole batch; their gradient keeps one part's residuals."""

        @jax.checkpoint
        def one(params: Any, i: jax.Array) -> Any:
            return self._part(i).outputs(params)

        def whole(stacked: jax.Array) -> jax.Array:
            return jnp.swapaxes(stacked, 0, 1).reshape(-1, *stacked.shape[2:])

        return jax.tree.map(whole, jax.lax.map(lambda i: one(params, i), jnp.arange(self.parts)))

    @property
    def batch_size(self) -> int:
        """The length of the first axis of the outputs, and of everything that is split."""
        batch, given = super().batch_size, [w for w in self.terms.weights if w is not None]
        if batch % self.parts:
            raise ValueError(
                f"micro_batches must divide the batch of {batch} examples, got {self.parts}"
            )
        for weights in given:
            if weights.shape[0] != batch:
                raise ValueError(
                    f"weights must have the shape of the outputs without the likelihood's event "
                    f"axes, of which the first are {batch} examples, got {weights.shape}"
                )
        if given and len(self.terms.each) > 1:
            raise NotImplementedError(
                "weights of several terms give every part of the batch another share of each: use "
                "micro_batches=1, or a single likelihood"
            )
        return batch

    def thinned(self, examples_of: Callable[[tuple[int, ...]], int], place: Scalar = 0) -> Oracle:
        """The oracle of every n-th example, of no more than one part has."""
        most = self.batch_size // self.parts
        return super().thinned(lambda shape: min(examples_of(shape), most), place)

    def _part(self, i: jax.Array) -> Oracle:
        rows = self.batch_size // self.parts
        own = self.part(lambda x: x.reshape(rows, self.parts, *x.shape[1:])[:, i])

        def fold(x: Any, *, raw: bool = True) -> Any:
            return _fold_in(x, i) if _is_key(x) or (raw and _is_raw_key(x)) else x

        call = dataclasses.replace(
            own.call,
            variables=jax.tree.map(functools.partial(fold, raw=False), own.call.variables),
            rngs=jax.tree.map(fold, own.call.rngs),
        )
        each = [
            dataclasses.replace(term, key=jax.tree.map(fold, term.key)) for term in own.terms.each
        ]
        terms = dataclasses.replace(own.terms, each=tuple(each))
        return dataclasses.replace(own, terms=terms, call=call)

    def _mean(self, function: Callable[[Oracle], Any]) -> Any:
        """Over the parts, each by its share of the weights."""

        def add(total: Any, i: jax.Array) -> tuple[Any, None]:
            part, own = self._part(i), jnp.asarray(1 / self.parts)
            (here, *_), (whole, *_) = part.terms.weights, self.terms.weights
            if here is not None and whole is not None:
                own = jnp.divide(*self.terms.axis.sum((here.sum(), whole.sum())))

            def plus(x: jax.Array, new: jax.Array) -> jax.Array:
                if not jnp.issubdtype(new.dtype, jnp.floating):
                    return new  # a counter, a key
                return x + jnp.where(own == 0, 0, own * new).astype(new.dtype)

            return jax.tree.map(plus, total, function(part)), None

        empty = zeros(jax.eval_shape(function, self._part(jnp.zeros((), int))))
        return jax.lax.scan(add, empty, jnp.arange(self.parts))[0]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_raw_key(x: Any) -> bool:
    """Whether this may be a key of ``jax.random.PRNGKey``, where a key is expected."""
    return jnp.ndim(x) == 1 and jnp.asarray(x).dtype == jnp.uint32


def _fold_in(key: jax.Array, i: jax.Array) -> jax.Array:
    """Another key for every part; of a stack of keys, each."""
    if jnp.ndim(key) == 0 or _is_raw_key(key):
        return jax.random.fold_in(key, i)
    return jax.vmap(lambda own: _fold_in(own, i))(key)
