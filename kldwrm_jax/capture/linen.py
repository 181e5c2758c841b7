"""Flax Linen models: layers are met through ``flax.linen.intercept_methods``.

Arrays are attached as entries of a layer's own ``params``, next to its kernel, so that lifted
transforms slice, broadcast and rematerialise them as they do the kernel.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from kldwrm_jax.capture import readers
from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.layer_call import Options
from kldwrm_jax.capture.model import Adapter
from kldwrm_jax.capture.readers import LayerMethod, ModuleCall
from kldwrm_jax.capture.tag import TaggedLeaf, tagged_site
from kldwrm_jax.capture.trace import Attached, CallSite, Path, TraceRecord, capture, recording

_OURS = "kldwrm:"  # begins the names of what is added to a layer's params

_FUSED_LSTM = inspect.unwrap(nn.OptimizedLSTMCell.__call__)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenAdapter(Adapter):
    """A Linen module, which is never changed."""

    module: nn.Module

    def example(self, call: Call) -> tuple[Any, Call]:
        """With the variables of ``model.init``, unless they were given."""
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)} | (_rngs(call) or {})
        call, variables = dataclasses.replace(call, rngs=keys), dict(call.variables)
        if "params" not in variables:

            def init(call: Call) -> Any:
                return self.module.init(_rngs(call) or {}, *call.args, **call.kwargs)

            try:
                variables = dict(jax.eval_shape(init, call))
            except ZeroDivisionError as error:
                raise ValueError(
                    "model.init divides by zero: Flax cannot initialise layers of width 0"
                ) from error
        return variables.pop("params", {}), dataclasses.replace(call, variables=variables)

    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """As they are."""
        return params, call

    def run(
        self, params: Any, call: Call, attached: Attached | None = None, label: str = ""
    ) -> tuple[Any, dict[str, Any], TraceRecord]:
        """Other collections run mutable; attached arrays join the ``params`` of their layers."""
        with recording() as record, contextlib.ExitStack() as stack:
            if attached is not None:
                interceptor = Interceptor(self.options, record)
                stack.enter_context(nn.intercept_methods(interceptor))
                record.find_leaf = interceptor.find_leaf
                flat = dict(flatten_dict(_as_dict(params)))
                tagged: dict[Path, Path] = {("/".join(path),): path for path in flat}
                for path, own in attached.items():
                    *module, name = tagged.get(path, (*path, ""))
                    prefix = interceptor.prefix(name)
                    flat |= {(*module, prefix + key): x for key, x in own.items()}
                params = _labelled(unflatten_dict(flat), label)
            variables, mutable = {"params": params, **call.variables}, list(call.variables)
            out, after = self.module.apply(
                variables, *call.args, **call.kwargs, rngs=_rngs(call), mutable=mutable
            )
        return out, dict(after), record


def _labelled(params: dict[str, Any], label: str) -> dict[str, Any]:
    """Params whose structure, without new leaves, says where in the model they are.

    An interceptor meets no layer inside a function that is compiled already, such as an ``nn.jit``
    of another module with equal shapes. Functions of these params are compiled for one place.
    """
    inner = {
        name: _labelled(value, f"{label}/{name}") if isinstance(value, dict) else value
        for name, value in params.items()
    }
    return {**inner, _OURS + label: {}}


def _rngs(call: Call) -> dict[str, jax.Array] | None:
    """Keys by name; a key alone is, as for Flax, that of ``params``."""
    if call.rngs is None:
        return None
    return dict(call.rngs) if isinstance(call.rngs, Mapping) else {"params": call.rngs}


def _as_dict(params: Any) -> dict[str, Any]:
    """The params of a Linen model, whatever mapping holds them, as plain dicts without boxes."""
    if isinstance(params, Mapping):
        return {name: _as_dict(value) for name, value in params.items()}
    return nn.unbox(params)


class Interceptor:
    """Records the modules that are called, and observes the layers among them.

    They are those of a Linen model; or, ``in_function``, those that a function calls with tagged
    leaves for their parameters.
    """

    def __init__(self, options: Options, record: TraceRecord, *, in_function: bool = False):
        self._options, self._module_types = options, record.module_types
        self._modules: tuple[nn.Module, ...] = ()  # those that are called now, innermost last
        self._in_function = in_function
        self._path: Path = ()  # of the module that the paths of modules are relative to
        self._wrapper: str | None = None  # what reparametrises the modules that are called now
        self._asleep = False

    def prefix(self, tagged: str = "") -> str:
        """Begins the names of what is attached to a layer, or to one tagged parameter."""
        # A function that is compiled for one instrumented model must not serve another.
        return f"{_OURS}{self._options.sharing}{'@' * bool(tagged)}{tagged}:"

    def find_leaf(self, given: Any) -> TaggedLeaf | None:
        """The parameter that a tag is given, of a module that is being called."""
        for module in (m for m in reversed(self._modules) if m.scope is not None):
            params = dict(flatten_dict(_as_dict(module.variables.get("params", {}))))
            for keys in [keys for keys, x in params.items() if x is given]:
                path = "/".join((*self._path, *module.path, *keys))
                if self._wrapper is not None:
                    raise ValueError(f"{path!r} is tagged, but reparametrised by {self._wrapper}")
                start = self.prefix(keys[-1])
                beside = {k[-1]: x for k, x in params.items() if k[:-1] == keys[:-1]}
                own = {k.removeprefix(start): x for k, x in beside.items() if k.startswith(start)}
                return TaggedLeaf(given, own, path, self._options, "")
        return None

    def __call__(
        self, next_fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any
    ) -> Any:
        """Runs a method of a module; the output of a layer is observed."""
        module, function = context.module, context.orig_method
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(getattr(function, "__func__", function))
        if self._asleep:
            return next_fun(*args, **kwargs)
        if function is _FUSED_LSTM:
            return self._unfused(module, args, kwargs)
        if isinstance(module, readers.REPARAMETRISATIONS) and context.method_name == "__call__":
            with self._set("_wrapper", type(module).__name__):
                return next_fun(*args, **kwargs)
        with self._set("_modules", (*self._modules, module)):
            out = next_fun(*args, **kwargs)
        if module.scope is None:
            return out
        path = self._path + module.path
        if isinstance(module, nnx.bridge.ToLinen):
            raise ValueError(
                f"{'/'.join(path) or 'root'!r}: the layers of an NNX module behind "
                f"nnx.bridge.ToLinen are not seen. Instrument the NNX module itself, or write this "
                f"part in Linen"
            )
        if not self._in_function:
            self._module_types[path] = type(module).__name__
        else:
            for leaf in self._own_parameters(module).values():
                if isinstance(leaf, TaggedLeaf):
                    self._module_types[tuple(leaf.path.split("/")[:-1])] = type(module).__name__
        method = readers.LINEN.get(function)
        if method is None:
            return out
        with self._set("_asleep", True):  # the inputs of a call may be another module's output
            return self._observed(path, module, method, method.bind(module, args, kwargs), out)

    def _observed(
        self, path: Path, module: Any, method: LayerMethod, bound: inspect.BoundArguments, out: Any
    ) -> Any:
        site = self._site(path, self._own_parameters(module))
        if site is None:
            return out

        def without_affine() -> jax.Array:
            names = [name for name in ("use_scale", "use_bias") if hasattr(module, name)]
            bare = module.clone(parent=None, name=None, **dict.fromkeys(names, False))
            others = {name: x for name, x in module.variables.items() if name != "params"}
            return bare.apply(others, *bound.args[1:], **bound.kwargs, mutable=list(others))[0]

        kind, inputs = method.layer.__name__, bound.args[1]
        call = method.read(
            ModuleCall(kind, inputs, site.shapes, self._options, module, bound, without_affine)
        )
        if self._wrapper is not None:
            call = f"its parameters are reparametrised by {self._wrapper}"
        return capture(call, site, out)

    def _own_parameters(self, module: nn.Module) -> dict[str, Any]:
        params = nn.unbox(dict(module.variables.get("params", {})))
        return {name: x for name, x in params.items() if not isinstance(x, Mapping)}

    def _site(self, path: Path, own: dict[str, Any]) -> CallSite | None:
        if self._in_function:
            return tagged_site(own)
        start = self.prefix()
        attached = {k.removeprefix(start): x for k, x in own.items() if k.startswith(start)}
        values = {name: x for name, x in own.items() if not name.startswith(_OURS)}
        parameters = {name: "/".join((*path, name)) for name in values}
        shapes = {name: jnp.shape(x) for name, x in values.items()}
        return CallSite(path, parameters, shapes, attached, tuple(values.values()))

    def _unfused(self, cell: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An OptimizedLSTMCell as the LSTMCell of its parameters, whose Dense layers are met."""
        names = {f.name for f in dataclasses.fields(nn.LSTMCell) if f.init} - {"parent", "name"}
        plain = nn.LSTMCell(**{name: getattr(cell, name) for name in names}, parent=None)
        with self._set("_path", self._path + cell.path):
            self._module_types[self._path] = type(cell).__name__
            return plain.apply({"params": cell.variables["params"]}, *args, **kwargs)

    @contextlib.contextmanager
    def _set(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)
