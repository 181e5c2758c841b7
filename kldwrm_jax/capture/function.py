"""Functions, whose layers are met where they are tagged or where Flax modules are called.

The parameters may be any pytree, an Equinox module too: its floating-point leaves are parameters,
its other arrays and its static leaves go where they were.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.linen import Interceptor
from kldwrm_jax.capture.model import Adapter
from kldwrm_jax.capture.nnx import layers_in_function
from kldwrm_jax.capture.observe import tell_folx
from kldwrm_jax.capture.tag import TaggedLeaf, as_leaf
from kldwrm_jax.capture.trace import Attached, TraceRecord, recording
from kldwrm_jax.paths import leaves_by_path, replace_leaves

_HINT = (
    "While kldwrm_jax looks for tags, the parameters are small pytree nodes that act as arrays in "
    "operators and jax.numpy, but not in jax.lax: write jnp.asarray(w) there, or tag the layer "
    "with a function, kw.tag(w, x, lambda x, w: ...). Trees that are taken apart before "
    "(equinox.partition) must not be put together inside the function: give it the whole model."
)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionAdapter(Adapter):
    """A function of parameters and a batch."""

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not jax.tree_util.all_leaves([self.function]):
            raise ValueError(
                f"model must be a function of parameters and a batch, got the pytree "
                f"{type(self.function).__name__}: write a function of it, such as lambda model, x: "
                f"jax.vmap(model)(x), and give the model as the parameters"
            )

    def example(self, call: Call) -> tuple[Any, Call]:
        """The parameters are the first argument."""
        if not call.args:
            raise ValueError(
                "a function is instrumented with an example of its parameters and of its batch: "
                "instrument(function, likelihood, params, x)"
            )
        return self.bind(call.args[0], dataclasses.replace(call, args=call.args[1:]))

    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """The parameters alone; what else their tree holds joins the call."""
        for name, value in (("variables", call.variables), ("rngs", call.rngs)):
            if value is not None and not (isinstance(value, Mapping) and not value):
                raise ValueError(
                    f"{name} are for Flax models, got {value!r}: a function takes what it needs "
                    f"among its arguments, net.oracle(params, x, ...)"
                )
        params, arrays, skeleton = _take_apart(params)
        return params, Call(call.args, call.kwargs, arrays, None, skeleton)

    def run(
        self, params: Any, call: Call, attached: Attached | None = None, label: str = ""
    ) -> tuple[Any, dict[str, Any], TraceRecord]:
        """The leaves of the parameters carry what is attached; there are no other variables."""
        leaves: dict[str, Any] = leaves_by_path(params)
        if attached is None:
            return self._call(leaves, call), {}, TraceRecord()
        for path, x in leaves.items():
            own = attached.get((path,), {})
            leaves[path] = TaggedLeaf(x, own, path, self.options, label)
        with recording() as record, contextlib.ExitStack() as stack:
            record.find_leaf = as_leaf
            tell_folx()
            interceptor = Interceptor(self.options, record, in_function=True)
            stack.enter_context(nn.intercept_methods(interceptor))
            stack.enter_context(layers_in_function())
            try:
                return self._call(leaves, call), {}, record
            except (TypeError, ValueError) as error:
                if "__jax_array__" in str(error) or TaggedLeaf.__name__ in str(error):
                    error.add_note(_HINT)
                raise

    def _call(self, leaves: Mapping[str, Any], call: Call) -> Any:
        tree = call.graph.fill({**leaves, **call.variables})
        return self.function(tree, *call.args, **call.kwargs)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The tree that a function is given, without its arrays."""

    treedef: Any
    paths: tuple[str, ...]  # of the leaves
    static: tuple[tuple[str, Any], ...]  # leaves that are no arrays, by path

    def fill(self, arrays: Mapping[str, Any]) -> Any:
        """The tree, with these arrays by path."""
        leaves = {**dict(self.static), **arrays}
        return self.treedef.unflatten([leaves[path] for path in self.paths])


def _take_apart(tree: Any) -> tuple[Any, dict[str, Any], Skeleton]:
    """Parameters, with None in place of other leaves; other arrays by path; the skeleton."""
    leaves = leaves_by_path(tree)
    arrays = {p: x for p, x in leaves.items() if hasattr(x, "shape") and hasattr(x, "dtype")}
    static = tuple((path, x) for path, x in leaves.items() if path not in arrays)
    others = {p: x for p, x in arrays.items() if not jnp.issubdtype(x.dtype, jnp.inexact)}
    dropped: Any = dict.fromkeys([*others, *dict(static)])
    skeleton = Skeleton(jax.tree.structure(tree), tuple(leaves), static)
    return replace_leaves(tree, dropped), others, skeleton
