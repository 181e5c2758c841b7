"""Flax Linen models: finding their layers, and running them with probes beside the parameters.

Layers are found and observed through ``flax.linen.intercept_methods`` alone. What is carried beside
a layer's parameters are entries of its own ``params``, next to the kernel, so that lifted
transforms slice, broadcast and rematerialise them as they do the kernel.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.linen_layers import READERS, REPARAMETRISATIONS, signature
from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Options, Reading
from kldwrm_jax.capture.sites import survey
from kldwrm_jax.capture.watch import Path, Watch, observed

# What the library adds to a layer's params: no parameter of a user's is called so.
_CARRIED = "kldwrm:"
_surveys = itertools.count()

_FUSED_LSTM = inspect.unwrap(nn.OptimizedLSTMCell.__call__)


class Interceptor(Watch):
    """A watch that sees the calls of Linen's modules, and observes layers that carry probes."""

    def __init__(self, options: Options):
        super().__init__()
        self._options = options
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
        if isinstance(module, nnx.bridge.ToLinen):
            raise ValueError(
                f"{'/'.join(path) or 'root'!r}: the layers of an NNX module behind "
                f"nnx.bridge.ToLinen are not seen. Instrument the NNX module itself, or write this "
                f"part in Linen"
            )
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
        prefix = _carried_prefix(self._options)
        own = {
            name: value
            for name, value in nn.unbox(dict(module.variables.get("params", {}))).items()
            if not isinstance(value, Mapping)
        }
        carried = {k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)}
        shapes = {k: jnp.shape(v) for k, v in own.items() if not k.startswith(_CARRIED)}
        parameters = {name: "/".join((*path, name)) for name in shapes}
        self.note(path, reading.role, parameters, shapes, carried)
        self._asleep = True  # a layer's inputs may be had by calling another
        try:
            return observed(reading, out, carried)
        finally:
            self._asleep = False

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


def _carried_prefix(options: Options) -> str:
    # Functions compiled for one instrumented model are not those of another with equal shapes.
    return f"{_CARRIED}{options.sharing}:"


def _function_of(method: Any) -> Any:
    """The function behind an interceptor's ``orig_method``, whatever it is bound with."""
    while isinstance(method, functools.partial):
        method = method.func
    return inspect.unwrap(getattr(method, "__func__", method))


def _uses_averages(module: nn.Module, call: inspect.BoundArguments) -> bool:
    asked = call.arguments.get("use_running_average")
    return bool(module.use_running_average if asked is None else asked)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenModel(Model):
    """A Linen module, which is never changed."""

    module: nn.Module

    def run(self, params: Any, call: Call) -> tuple[Any, dict[str, Any]]:
        """Other collections run mutable."""
        return _run(self.module, params, call)

    def observed_run(
        self, params: Any, call: Call, carried: Mapping[Path, Probes]
    ) -> tuple[Any, dict[str, Any], Watch]:
        """What is carried joins the layers' ``params``."""
        together = _labelled(_with_carried(params, carried, self.options), "observed")
        watch = Interceptor(self.options)
        with nn.intercept_methods(watch):
            out, variables = _run(self.module, together, call)
        return out, variables, watch


def _with_carried(
    params: Any, carried: Mapping[Path, Mapping[str, Any]], options: Options
) -> dict[str, Any]:
    flat = dict(flatten_dict(_as_dict(params)))
    for path, own in carried.items():
        flat |= {(*path, _carried_prefix(options) + name): x for name, x in own.items()}
    return unflatten_dict(flat)


def _labelled(params: dict[str, Any], label: str) -> dict[str, Any]:
    """Params whose structure says where in the model they are, without new leaves.

    An interceptor meets no layer inside a function that is compiled already, be it for another
    module of equal shapes (``nn.jit``); functions of these params are compiled for one place.
    """
    inner = {
        name: _labelled(value, f"{label}/{name}") if isinstance(value, dict) else value
        for name, value in params.items()
    }
    return {**inner, _CARRIED + label: {}}


def _run(module: nn.Module, params: Any, call: Call) -> tuple[Any, dict[str, Any]]:
    """What the model returns, and the other collections after the call."""
    out, variables = module.apply(
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


def survey_linen(
    module: nn.Module,
    output: Callable[[Any], jax.Array] | None,
    options: Options,
    call: Call,
) -> LinenModel:
    """Finds a model's layers by tracing an example call; nothing is computed."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    call = dataclasses.replace(call, rngs=keys | (_rngs(call) or {}))
    variables = dict(call.variables)
    if "params" not in variables:
        variables = dict(jax.eval_shape(functools.partial(_init, module), call))
    params = variables.pop("params", {})
    call = dataclasses.replace(call, variables=variables)

    def look(carried: Mapping[Path, Mapping[str, jax.ShapeDtypeStruct]]) -> Watch:
        watch = Interceptor(options)
        together = _with_carried(params, carried, options)
        labelled = _labelled(together, f"survey {next(_surveys)}")
        with nn.intercept_methods(watch):
            jax.eval_shape(functools.partial(_run, module), labelled, call)
        return watch

    flat = {"/".join(path): (path, x.shape) for path, x in flatten_dict(_as_dict(params)).items()}

    def owner_of(parameter: str, watch: Watch) -> tuple[str, str]:
        owner = flat[parameter][0][:-1]
        kind = watch.modules.get(owner, "parameter")
        return kind, watch.refused.get(owner, f"there is no rule for {kind}")

    found, watch = survey(
        shapes={path: shape for path, (_, shape) in flat.items()},
        look=look,
        name_of=lambda path, _: "/".join(path) or "root",
        owner_of=owner_of,
    )
    return LinenModel(output, options, found, tuple(watch.mixing), module)


def _init(module: nn.Module, call: Call) -> Any:
    return module.init(_rngs(call) or {}, *call.args, **call.kwargs)
