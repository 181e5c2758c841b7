"""Flax Linen models: finding their layers, and running them with probes beside the parameters.

Layers are found and observed through ``flax.linen.intercept_methods`` alone. A layer's probes are
entries of its own ``params``, next to the kernel, so that lifted transforms slice, broadcast and
rematerialise them as they do the kernel.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.linen_layers import (
    READERS,
    REPARAMETRISATIONS,
    Options,
    Reading,
    Role,
    signature,
)
from kldwrm_jax.capture.sites import Site, Stack, blocks_of, find_stack, merge_roles
from kldwrm_jax.capture.statistics import Probes, observe
from kldwrm_jax.curvature import Diagonal, LayerBlock, Layers, Parameter

Path = tuple[str, ...]

# What the library adds to a layer's params: no parameter of a user's is called so.
_PROBE = "kldwrm:"
_WEIGHTS = _PROBE + "weights"
_MARK = _PROBE + "mark"
_MARK_LENGTHS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # that no stack has
_surveys = itertools.count()

_FUSED_LSTM = inspect.unwrap(nn.OptimizedLSTMCell.__call__)


class Watch:
    """An interceptor that observes layers which carry probes, and notes what it meets."""

    def __init__(self, options: Options, weights_ndim: int = 0):
        self.roles: dict[Path, list[Role]] = {}
        self.shapes: dict[Path, dict[str, tuple[int, ...]]] = {}  # inside lifted transforms
        self.modules: dict[Path, str] = {}
        self.refused: dict[Path, str] = {}
        self.mixing: list[Path] = []  # layers in which examples depend on each other
        self._options = options
        self._weights_ndim = weights_ndim
        self._prefix: Path = ()
        self._wrappers: list[str] = []
        self._asleep = False

    def __call__(
        self, next_fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any
    ) -> Any:
        """Runs a method of a module; a layer's output passes through its probes."""
        module, method = context.module, _function_of(context.orig_method)
        if self._asleep:
            return next_fun(*args, **kwargs)
        if method is _FUSED_LSTM:
            return self._unfused(module, args, kwargs)
        if isinstance(module, REPARAMETRISATIONS) and context.method_name == "__call__":
            return self._wrapped(module, next_fun, args, kwargs)
        out = next_fun(*args, **kwargs)
        return out if module.scope is None else self._met(module, method, args, kwargs, out)

    def _met(
        self, module: nn.Module, method: Any, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Notes a module that has been called; its output, observed if it is a layer."""
        path = self._prefix + module.path
        self.modules[path] = type(module).__name__
        reader = READERS.get(method)
        if reader is None:
            return out
        call = signature(method).bind(module, *args, **kwargs)
        call.apply_defaults()
        reading = reader(module, call, self._options)
        if self._wrappers:
            reading = f"its parameters are reparametrised by {self._wrappers[-1]}"
        if isinstance(reading, str):
            self.refused[path] = reading
            return out
        if isinstance(module, nn.BatchNorm) and not _uses_averages(module, call):
            self.mixing.append(path)
        return self._observed(path, module, reading, out)

    def _wrapped(
        self, wrapper: nn.Module, next_fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        self._wrappers.append(type(wrapper).__name__)
        try:
            return next_fun(*args, **kwargs)
        finally:
            self._wrappers.pop()

    def _observed(self, path: Path, module: nn.Module, reading: Reading, out: Any) -> Any:
        own = nn.unbox(dict(module.variables.get("params", {})))
        self.roles.setdefault(path, []).append(reading.role)
        self.shapes[path] = {k: jnp.shape(v) for k, v in own.items() if not isinstance(v, Mapping)}
        weights = own.pop(_WEIGHTS, None)
        if weights is not None:
            weights = weights.reshape(weights.shape[: self._weights_ndim])
        prefix = _probe_prefix(self._options)
        probes = {k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)}
        if not probes:
            return out
        self._asleep = True  # a layer's inputs may be had by calling another
        try:
            inputs = reading.inputs()
        finally:
            self._asleep = False
        return observe(reading.statistic, out, inputs, probes, weights)

    def _unfused(self, cell: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An OptimizedLSTMCell as the LSTMCell with its parameters, whose Dense layers are seen."""
        names = {f.name for f in dataclasses.fields(nn.LSTMCell) if f.init} - {"parent", "name"}
        plain = nn.LSTMCell(**{name: getattr(cell, name) for name in names}, parent=None)
        before, self._prefix = self._prefix, self._prefix + cell.path
        try:
            self.modules[self._prefix] = type(cell).__name__
            return plain.apply({"params": cell.variables["params"]}, *args, **kwargs)
        finally:
            self._prefix = before


def _probe_prefix(options: Options) -> str:
    # Functions compiled for one instrumented model are not those of another with equal shapes.
    return f"{_PROBE}{options.sharing}:"


def _function_of(method: Any) -> Any:
    """The function behind an interceptor's ``orig_method``, whatever it is bound with."""
    while isinstance(method, functools.partial):
        method = method.func
    return inspect.unwrap(getattr(method, "__func__", method))


def _uses_averages(module: nn.Module, call: inspect.BoundArguments) -> bool:
    asked = call.arguments.get("use_running_average")
    return bool(module.use_running_average if asked is None else asked)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen model, its layers, and how to run it with and without probes.

    Args:
      model: the user's module, never changed.
      output: picks what the likelihood sees from what the model returns.
      options: how layers are read.
      layers: every curvature block.
      sites: the layers whose statistics are collected.
      uncovered: paths of the parameters that no layer's rule covers.
      mixing: paths of the layers in which the examples of the example call depend on each other.
    """

    model: nn.Module
    output: Callable[[Any], jax.Array] | None
    options: Options
    layers: Layers
    sites: tuple[Site, ...]
    uncovered: tuple[str, ...]
    mixing: tuple[Path, ...]

    def outputs(self, params: Any, call: Call) -> jax.Array:
        """What the likelihood sees. Other collections run mutable; their updates are dropped."""
        return self._picked(_run(self.model, params, call)[0])

    def _picked(self, out: Any) -> jax.Array:
        out = out if self.output is None else self.output(out)
        if not hasattr(out, "shape"):
            raise ValueError(
                f"the model returns a {type(out).__name__}: say which array the likelihood sees, "
                f"as in instrument(..., output=lambda out: out[0])"
            )
        return out.astype(jnp.promote_types(out.dtype, jnp.float32))

    def probes(self) -> dict[str, Probes]:
        """Zero probes of every site, stacked as its parameters are."""
        return {
            site.name: {
                name: site.stack.spread(jnp.zeros(shape, float))
                for name, shape in site.role.observation.probes.items()
            }
            for site in self.sites
        }

    def observed_outputs(
        self, params: Any, call: Call, weights: jax.Array | None, probes: dict[str, Probes]
    ) -> tuple[jax.Array, dict[str, Any], Watch]:
        """:meth:`outputs`, whose cotangents for ``probes`` are the statistics.

        With them the other collections as they are after the call.
        """
        flat = dict(flatten_dict(_as_dict(params)))
        for site in self.sites:
            for name, probe in probes[site.name].items():
                flat[(*site.path, _probe_prefix(self.options) + name)] = probe
            if weights is not None:
                padded = weights.reshape(weights.shape + (1,) * max(0, 2 - weights.ndim))
                flat[(*site.path, _WEIGHTS)] = site.stack.spread(padded)
        watch = Watch(self.options, 0 if weights is None else weights.ndim)
        with nn.intercept_methods(watch):
            params = _labelled(unflatten_dict(flat), "observed")
            out, variables = _run(self.model, params, call)
        return self._picked(out), variables, watch

    def check_reached(self, params: Any, call: Call, watch: Watch) -> None:
        """An error if a layer of this model was not met, or not in the way that was instrumented.

        Layers inside a function that was compiled before are not met again, and yet observed; so
        what the interceptor misses is counted, on zeros, before it is called missing.
        """
        changed = [
            site.name
            for site in self.sites
            if not all(site.role.covers(role) for role in watch.roles.get(site.path, []))
        ]
        if changed:
            raise ValueError(
                f"layers {', '.join(map(repr, changed))} are called in another way than they were "
                f"instrumented: call instrument with the arguments (train or eval mode, flags) "
                f"that the oracle is given"
            )
        missing = [site for site in self.sites if site.path not in watch.roles]
        if not missing:
            return
        with jax.ensure_compile_time_eval():
            zero_params, zero_call = jax.tree.map(_zero, (params, call))
            _, vjp = jax.vjp(
                lambda p: self.observed_outputs(zero_params, zero_call, None, p)[0], self.probes()
            )
            shape = jax.eval_shape(self.outputs, zero_params, zero_call)
            (seen,) = vjp(jnp.zeros(shape.shape, shape.dtype))
            hidden = [site.name for site in missing if not site.reached(seen[site.name])]
        if hidden:
            raise ValueError(
                f"layers {', '.join(map(repr, hidden))} were instrumented but are not called for "
                f"this batch: call instrument with the arguments (train or eval mode, flags) that "
                f"the oracle is given, and have the model call its submodules directly, not a "
                f"jitted apply of them"
            )

    def mixing_layers(self, watch: Watch) -> list[str]:
        """Layers in which examples depend on each other; those not met are as they were found."""
        unmet = [path for path in self.mixing if path not in watch.modules]
        return ["/".join(path) or "root" for path in (*watch.mixing, *unmet)]


def _labelled(params: dict[str, Any], label: str) -> dict[str, Any]:
    """Params whose structure says where in the model they are, without new leaves.

    An interceptor meets no layer inside a function that is compiled already, be it for another
    module of equal shapes (``nn.jit``); functions of these params are compiled for one place.
    """
    inner = {
        name: _labelled(value, f"{label}/{name}") if isinstance(value, dict) else value
        for name, value in params.items()
    }
    return {**inner, _PROBE + label: {}}


def _zero(x: Any) -> jax.Array:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.zeros(jax.eval_shape(jax.random.key_data, x).shape, jnp.uint32),
            impl=jax.random.key_impl(x),
        )
    return jnp.zeros(x.shape, x.dtype)


def _run(model: nn.Module, params: Any, call: Call) -> tuple[Any, dict[str, Any]]:
    """What the model returns, and the other collections after the call."""
    out, variables = model.apply(
        {"params": params, **call.variables},
        *call.args,
        **call.kwargs,
        rngs=_rngs(call),
        mutable=list(call.variables),
    )
    return out, dict(variables)


def _rngs(call: Call) -> dict[str, jax.Array] | None:
    """Keys by name; a key alone is, as for Flax, that of ``params``."""
    if call.rngs is None:
        return None
    if isinstance(call.rngs, Mapping):
        return dict(call.rngs)
    return {"params": call.rngs}


def _as_dict(params: Any) -> dict[str, Any]:
    """Nested plain dicts, unboxed: the params of a Linen model, whatever mapping holds them."""
    if isinstance(params, Mapping):
        return {name: _as_dict(value) for name, value in params.items()}
    return nn.unbox(params)


# --- Finding layers -------------------------------------------------------------------------------


def survey(
    model: nn.Module,
    output: Callable[[Any], jax.Array] | None,
    options: Options,
    call: Call,
) -> LinenModel:
    """Finds a model's layers by tracing an example call; nothing is computed."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    call = dataclasses.replace(call, rngs=keys | (_rngs(call) or {}))
    variables = dict(call.variables)
    if "params" not in variables:
        variables = dict(jax.eval_shape(functools.partial(_init, model), call))
    params = variables.pop("params", {})
    call = dataclasses.replace(call, variables=variables)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(_as_dict(params)).items()}

    watch = _look(model, options, params, call)
    sites = []
    for path, roles in watch.roles.items():
        own = {name: shapes.get((*path, name)) for name in watch.shapes[path]}
        if not own or None in own.values():
            continue  # not a layer of this tree of parameters: it is named among the uncovered
        role = merge_roles(roles)
        if role is None:
            watch.refused[path] = "it is called in different ways"
            continue
        stack = _stack(model, options, params, call, path, watch.shapes[path], own)
        sites.append(Site(path, role, blocks_of(path, role, stack, own), stack))

    covered = {p.path for site in sites for block in site.blocks for p in block.parameters}
    missed = {path: shape for path, shape in shapes.items() if "/".join(path) not in covered}
    every_block = [block for site in sites for block in site.blocks]
    every_block += [_uncovered_block(path, shape, watch) for path, shape in missed.items()]
    return LinenModel(
        model=model,
        output=output,
        options=options,
        layers=Layers(tuple(every_block)),
        sites=tuple(sites),
        uncovered=tuple("/".join(path) for path in missed),
        mixing=tuple(watch.mixing),
    )


def _init(model: nn.Module, call: Call) -> Any:
    return model.init(_rngs(call) or {}, *call.args, **call.kwargs)


def _look(model: nn.Module, options: Options, params: Any, call: Call) -> Watch:
    """What an interceptor meets in a call, by shapes alone."""
    watch = Watch(options)
    labelled = _labelled(_as_dict(params), f"survey {next(_surveys)}")
    with nn.intercept_methods(watch):
        jax.eval_shape(functools.partial(_run, model), labelled, call)
    return watch


def _stack(
    model: nn.Module,
    options: Options,
    params: Any,
    call: Call,
    path: Path,
    inside: Mapping[str, tuple[int, ...]],
    outside: Mapping[str, tuple[int, ...] | None],
) -> Stack:
    """How a layer's parameters are stacked, from their shapes inside and outside the call.

    Where lengths coincide, the shapes fit axes that are not the stack's: arrays of lengths that
    occur nowhere else, one for every number of axes that parameters and probes have, show it.
    """
    ranks = {2, 3} | {len(shape) for shape in inside.values()}
    marks = {f"{_MARK}{rank}": _MARK_LENGTHS[:rank] for rank in ranks}

    def arrives(stack: Stack) -> bool:
        flat = dict(flatten_dict(_as_dict(params)))
        for name, shape in marks.items():
            mark = jax.ShapeDtypeStruct(shape, jnp.float32)
            flat[(*path, name)] = jax.eval_shape(stack.spread, mark)
        try:
            seen = _look(model, options, unflatten_dict(flat), call).shapes[path]
        except ValueError:
            return False
        return all(seen[name] == shape for name, shape in marks.items())

    candidates: Sequence[Stack] = find_stack(inside, outside)
    if candidates != [Stack()]:
        candidates = [stack for stack in candidates if arrives(stack)]
    if not candidates:
        raise ValueError(
            f"the parameters of {'/'.join(path)!r} are stacked in a way that is not understood: "
            f"{dict(inside)} inside its lifted transform, {dict(outside)} outside; nested scans "
            f"and vmaps must stack along leading axes (variable_axes={{'params': 0}})"
        )
    return candidates[0]


def _uncovered_block(path: Path, shape: tuple[int, ...], watch: Watch) -> LayerBlock:
    owner = path[:-1]
    kind = watch.modules.get(owner, "parameter")
    reason = watch.refused.get(owner, f"there is no rule for {kind}")
    name = "/".join(path)
    return LayerBlock(
        name=name,
        kind=kind,
        block=Diagonal(),
        parameters=(Parameter(name, shape),),
        shapes=(shape,),
        note=f"{reason}: a diagonal from squared random-sign gradients",
    )
