"""Plain JAX functions with marks: finding their layers, and running them with probes.

The parameters may be any pytree, an Equinox module too: its floating-point leaves are parameters,
its other arrays and its static leaves go where they were.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.mark import Leaf, Marked, Marks
from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Options
from kldwrm_jax.capture.sites import survey
from kldwrm_jax.capture.watch import Path, Watch, watching
from kldwrm_jax.paths import leaves_by_path, path_of

_surveys = itertools.count()

_HINT = (
    "While kldwrm_jax looks for marks, the parameters are small pytree nodes that act as arrays in "
    "operators and jax.numpy, but not in jax.lax: write jnp.asarray(w) there, or mark the layer "
    "with a function, kw.tag(w, x, lambda x, w: ...). Trees that are taken apart before "
    "(equinox.partition) must not be put together inside the function: give it the whole model."
)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The tree that a function is given, without its arrays.

    Args:
      treedef: its structure.
      paths: of its leaves, in order.
      static: leaves that are no arrays, by their paths.
    """

    treedef: Any
    paths: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]

    def fill(self, leaves: Mapping[str, Any]) -> Any:
        """The tree, with these leaves by their paths."""
        every = dict(self.static) | dict(leaves)
        return self.treedef.unflatten([every[path] for path in self.paths])


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_parameter(x: Any) -> bool:
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _taken_apart(tree: Any) -> tuple[Any, dict[str, Any], Skeleton]:
    """Parameters, with None in place of other leaves; other arrays by path; the skeleton."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [(path_of(keys), x) for keys, x in keyed]
    skeleton = Skeleton(
        treedef,
        tuple(path for path, _ in leaves),
        tuple((path, x) for path, x in leaves if not _is_array(x)),
    )
    others = {path: x for path, x in leaves if _is_array(x) and not _is_parameter(x)}
    params = jax.tree.map(lambda x: x if _is_parameter(x) else None, tree)
    return params, others, skeleton


def _run(function: Callable[..., Any], leaves: Mapping[str, Any], call: Call) -> Any:
    tree = call.graph.fill({**leaves, **call.variables})
    return function(tree, *call.args, **call.kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel(Model):
    """A function of parameters and a batch, with marks.

    Args:
      function: the user's.
      marked: paths of the leaves that its marks name.
    """

    function: Callable[..., Any]
    marked: tuple[str, ...]

    def run(self, params: Any, call: Call) -> tuple[Any, dict[str, Any]]:
        """There are no other variables."""
        return _run(self.function, leaves_by_path(params), call), {}

    def observed_run(
        self, params: Any, call: Call, carried: Mapping[Path, Probes]
    ) -> tuple[Any, dict[str, Any], Watch]:
        """Leaves that are named by marks carry the probes."""
        leaves: dict[str, Any] = dict(leaves_by_path(params))
        for path in self.marked:
            leaf = Leaf(path, self.options, "observed")
            leaves[path] = Marked(leaves[path], carried.get((path,), {}), leaf)
        with watching(Marks()) as watch:
            out = _run(self.function, leaves, call)
        return out, {}, watch

    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """All that the function takes beside the parameters is among its arguments."""
        return _bound(params, call)


def _bound(params: Any, call: Call) -> tuple[Any, Call]:
    for name, value in (("variables", call.variables), ("rngs", call.rngs)):
        if value is not None and not (isinstance(value, Mapping) and not value):
            raise ValueError(
                f"{name} are for Flax models, got {value!r}: a function takes what it needs among "
                f"its arguments, net.oracle(params, x, ...)"
            )
    params, others, skeleton = _taken_apart(params)
    return params, Call(call.args, call.kwargs, others, None, skeleton)


def survey_function(
    function: Callable[..., Any],
    output: Callable[[Any], jax.Array] | None,
    options: Options,
    call: Call,
) -> FunctionModel:
    """Finds a function's marks by tracing an example call; nothing is computed."""
    if not jax.tree_util.all_leaves([function]):
        raise ValueError(
            f"model must be a function of parameters and a batch, got the pytree "
            f"{type(function).__name__}: write a function of it, such as lambda model, x: "
            f"jax.vmap(model)(x), and give the model as the parameters"
        )
    if not call.args:
        raise ValueError(
            "a function is instrumented with an example of its parameters and of its batch: "
            "instrument(function, likelihood, params, x)"
        )
    params, call = _bound(call.args[0], dataclasses.replace(call, args=call.args[1:]))
    example = leaves_by_path(params)

    def look(carried: Mapping[Path, Mapping[str, jax.ShapeDtypeStruct]]) -> Watch:
        label = f"survey {next(_surveys)}"

        def run(leaves: dict[str, Any], call: Call, carried: Any) -> None:
            marked = {
                path: Marked(x, carried.get((path,), {}), Leaf(path, options, label))
                for path, x in leaves.items()
            }
            _run(function, marked, call)

        with watching(Marks()) as watch:
            try:
                jax.eval_shape(run, example, call, dict(carried))
            except (TypeError, ValueError) as error:
                if "__jax_array__" in str(error) or Marked.__name__ in str(error):
                    error.add_note(_HINT)
                raise
        return watch

    def name_of(path: Path, watch: Watch) -> str:
        """The place of a mark's parameters, if nothing else is there; or that of its kernel."""
        own = set(watch.parameters[path].values())
        parent = path[0].rpartition("/")[0]
        here = {p for p in example if p.startswith(f"{parent}/")}
        return parent if parent and here == own else path[0]

    found, watch = survey(
        shapes={path: x.shape for path, x in example.items()},
        look=look,
        name_of=name_of,
        owner_of=lambda *_: ("parameter", "no mark names it"),
    )
    marked = {p for own in watch.parameters.values() for p in own.values()}
    return FunctionModel(output, options, found, (), function, tuple(sorted(marked)))
