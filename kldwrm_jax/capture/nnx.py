"""Flax NNX models: layers are met through subclasses, on a copy of the model.

A model is run on a copy that is made for the run and dropped after it. On the copy, a layer is of a
subclass of its own class whose methods observe their output, and arrays are attached as variables
whose type derives from the kernel's: so filters by type, ``nnx.scan``, ``nnx.vmap`` and
``nnx.remat`` treat them as they treat the kernel. The user's model and every class stay as they
are.
"""

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from kldwrm_jax.capture import readers
from kldwrm_jax.capture.call import Call, Slot
from kldwrm_jax.capture.layer_call import Options
from kldwrm_jax.capture.model import Adapter
from kldwrm_jax.capture.readers import LayerMethod, ModuleCall
from kldwrm_jax.capture.tag import TaggedLeaf, tag, tagged_site
from kldwrm_jax.capture.trace import (
    Attached,
    CallSite,
    Path,
    TraceRecord,
    capture,
    current_record,
    recording,
)
from kldwrm_jax.paths import leaves_by_path

_OURS = "kldwrm_"  # begins the names of what is added to a layer
_TAGS = _OURS + "tag:"  # and to a tagged parameter
_PARAMETERS = ("kernel", "embedding", "scale", "bias")  # a layer is where the first of them is


@dataclasses.dataclass(frozen=True, eq=False)
class NNXAdapter(Adapter):
    """An NNX module, of which only the structure is kept."""

    graph: Any
    params: Any  # as shapes
    others: Any  # variables that are no parameters, as shapes

    def example(self, call: Call) -> tuple[Any, Call]:
        """With the parameters of the model that was instrumented."""
        others = call.variables or self.others
        call = _streams_apart(call)
        return self.params, dataclasses.replace(call, variables=others, graph=self.graph)

    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """From the model itself, as it is now; or from its parameters and other variables."""
        graph, others = self.graph, call.variables
        names = ", ".join(leaves_by_path(self.others))
        if isinstance(params, nnx.Module):
            graph, params, current = _split(params)
            others = others or current
            here, known = (sorted(leaves_by_path(tree)) for tree in (params, self.params))
            if here != known:
                raise ValueError(
                    f"the model has the parameters {', '.join(here)}, but it was instrumented with "
                    f"{', '.join(known)}: call instrument with the model as it is now"
                )
        elif not others and names:
            raise ValueError(
                f"the model has variables that are no parameters ({names}): give net.oracle the "
                f"model itself, or variables=nnx.state(model, nnx.Not(nnx.Param))"
            )
        others = _values(others) if others else nnx.State({})
        call = _streams_apart(call)
        return params, dataclasses.replace(call, variables=others, graph=graph)

    def run(
        self, params: Any, call: Call, attached: Attached | None = None, label: str = ""
    ) -> tuple[Any, Any, TraceRecord]:
        """On a copy, whose layers observe themselves if anything is attached."""
        model: Any = nnx.merge(call.graph, _values(params), call.variables, copy=True)
        args, kwargs = _with_streams(call)
        with recording() as record:
            if attached is not None:
                for keys, module in nnx.iter_modules(model):
                    record.module_types[tuple(map(str, keys))] = type(module).__name__
                record.find_leaf = functools.partial(_find_leaf, record)
                for module, place in _places(model, self.options, label):
                    _make_observed(module, place, attached)
            out = model(*args, **kwargs)
        return out, _values(nnx.state(model, nnx.Not(nnx.Param))), record


def adapt_nnx(model: nnx.Module, options: Options) -> NNXAdapter:
    """The adapter of a model."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.bridge.ToNNX):
            raise ValueError(
                f"{'/'.join(map(str, path)) or 'root'!r}: the layers of a Linen module behind "
                f"nnx.bridge.ToNNX are not seen. Instrument the Linen module itself, or write this "
                f"part in NNX"
            )
    graph, *trees = _split(model)
    return NNXAdapter(options, graph, *jax.eval_shape(lambda *trees: trees, *trees))


def _split(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Structure, parameters and other variables: copies, so that the model may change."""
    graph, params, *others = nnx.split(model, nnx.Param, ...)
    return graph, jax.tree.map(lambda x: x, params), _values(others[0])


def _values(tree: Any) -> Any:
    """A tree without its variables' types, which Flax before 0.12.7 has no function for."""
    return jax.tree.map(
        lambda x: x.get_raw_value() if isinstance(x, nnx.Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def _is_stream(x: Any) -> bool:
    return isinstance(x, nnx.Rngs | nnx.RngStream)


def _streams_apart(call: Call) -> Call:
    """The call with copies of its random streams, ``nnx.Rngs``, among ``rngs``."""
    kwargs, states = dict(call.kwargs), []
    if _is_stream(call.rngs):
        kwargs["rngs"] = call.rngs
    elif isinstance(call.rngs, Mapping):
        kwargs["rngs"] = nnx.Rngs(**call.rngs)
    elif call.rngs is not None:
        kwargs["rngs"] = nnx.Rngs(call.rngs)

    def put_aside(x: Any) -> Any:
        if not _is_stream(x):
            return x
        graph, state = nnx.split(x)
        states.append(_values(state))
        return Slot(len(states) - 1, graph)

    args, kwargs = jax.tree.map(put_aside, (call.args, kwargs), is_leaf=_is_stream)
    return dataclasses.replace(call, args=args, kwargs=kwargs, rngs=tuple(states))


def _with_streams(call: Call) -> tuple[tuple, dict[str, Any]]:
    """Arguments with random streams of their own for one run."""

    def fill(x: Any) -> Any:
        return nnx.merge(x.graph, call.rngs[x.index], copy=True) if isinstance(x, Slot) else x

    args, kwargs = jax.tree.map(fill, (call.args, dict(call.kwargs)))
    return args, kwargs


def fork_streams(arguments: Any) -> Any:
    """Arguments with new random streams, forked from those given, which advance."""
    return jax.tree.map(lambda x: x.fork() if _is_stream(x) else x, arguments, is_leaf=_is_stream)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a module is in its model. Static, so that compiled functions serve one place alone."""

    path: Path  # of the module's parameters
    parameters: tuple[tuple[str, str], ...]  # their names in the module, and their paths
    wrapper: str | None  # the type of what reparametrises the module
    options: Options
    label: str


def _places(model: nnx.Module, options: Options, label: str) -> list[tuple[Any, Place]]:
    """Every module that has parameters or is a layer, and its place.

    Layers that share all their parameters share it.
    """
    paths = {id(x): keys for keys, x in nnx.iter_graph(model) if isinstance(x, nnx.Param)}
    modules = list(nnx.iter_modules(model))
    wrappers = [(keys, m) for keys, m in modules if isinstance(m, readers.REPARAMETRISATIONS)]
    found = []
    for keys, module in modules:
        own = {name: paths[id(x)] for name, x in vars(module).items() if id(x) in paths}
        if not own and _known_layer(type(module)) is None:
            continue
        path = next((own[name][:-1] for name in _PARAMETERS if name in own), keys)
        around = (type(m).__name__ for outer, m in wrappers if keys[: len(outer)] == outer)
        parameters = tuple((name, "/".join(map(str, p))) for name, p in sorted(own.items()))
        here = tuple(map(str, path))
        found.append((module, Place(here, parameters, next(around, None), options, label)))
    return found


def _make_observed(module: Any, place: Place, attached: Attached) -> None:
    """Makes a module, which is nobody else's, observe itself, and be found by tags."""
    cls: Any = type(module)
    variables: dict[str, Any] = {name: type(getattr(module, name)) for name, _ in place.parameters}
    object.__setattr__(module, "__class__", _observed_class(cls))
    module.kldwrm_place = place
    first: Any = next(iter(variables.values()), nnx.Param)
    for name, x in attached.get(place.path, {}).items():
        setattr(module, _OURS + name, _subclass(first)(x))
    for parameter, path in place.parameters:
        for name, x in attached.get((path,), {}).items():
            setattr(module, _tagged(parameter) + name, _subclass(variables[parameter])(x))


def _tagged(parameter: str) -> str:
    """How the names of what is attached to a tagged parameter begin."""
    return f"{_TAGS}{parameter}:"


def _find_leaf(record: TraceRecord, given: Any) -> TaggedLeaf | None:
    """The parameter that a tag is given: a variable that a module has read, or its value."""
    for variable, module in record.read_variables:
        if given is not variable and given is not variable.get_raw_value():
            continue
        place: Place = module.kldwrm_place
        own = {name: x for name, x in vars(module).items() if isinstance(x, nnx.Variable)}
        name = next(name for name, x in own.items() if x is variable)
        path = dict(place.parameters).get(name)
        if path is None:
            return None
        if place.wrapper is not None:
            raise ValueError(f"{path!r} is tagged, but reparametrised by {place.wrapper}")
        prefix = _tagged(name)
        attached = {
            key.removeprefix(prefix): x[...] for key, x in own.items() if key.startswith(prefix)
        }
        return TaggedLeaf(variable.get_raw_value(), attached, path, place.options, place.label)
    return None


def _known_layer(cls: type) -> type | None:
    return next((base for base in cls.__mro__ if base in readers.NNX or base is nnx.LoRA), None)


@functools.cache
def _observed_class(cls: type) -> type:
    """A subclass that observes what a class does through the calls of its base, a known layer."""
    layer: Any = _known_layer(cls)
    if cls is not layer:
        others = () if layer is None else (_observed_class(layer),)
        return _remembers_reads(_subclass(cls, *others))
    observed = _remembers_reads(_subclass(cls))
    if layer is nnx.LoRA:
        observed.__call__ = _tagged_lora
        return observed
    for method in readers.NNX[layer]:
        setattr(observed, method.name, _observed_method(method))
    return observed


def _remembers_reads(cls: Any) -> Any:
    """Has a class remember which module a variable was read from, for tags."""
    inherited = cls.__getattribute__

    def read(self: Any, name: str) -> Any:
        value = inherited(self, name)
        record = current_record()
        if record is not None and isinstance(value, nnx.Variable):
            record.read_variables.append((value, self))
        return value

    cls.__getattribute__ = read
    return cls


def _tagged_lora(self: Any, x: jax.Array, **kwargs: Any) -> jax.Array:
    """A LoRA as the two matrix products that it is."""
    if not {"lora_a", "lora_b"} <= {name for name, _ in self.kldwrm_place.parameters}:
        return nnx.LoRA.__call__(self, x, **kwargs)
    a, b = self.lora_a, self.lora_b
    x, a_value, b_value = self.promote_dtype((x, a[...], b[...]), dtype=self.dtype)
    z = tag(a, x, x @ a_value)
    out = tag(b, z, z @ b_value)
    return out if self.base_module is None else out + self.base_module(x, **kwargs)


@functools.cache
def _subclass(cls: type, *others: type) -> Any:
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(cls.__name__, (cls, *others), {}, lambda ns: ns.update(names))


def _observed_method(method: LayerMethod) -> Callable[..., Any]:
    """A method of a layer whose output is observed."""
    original = _ORIGINALS[method]

    @functools.wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        place: Place = self.kldwrm_place
        variables = {name: x for name, x in vars(self).items() if isinstance(x, nnx.Variable)}
        ours = {name for name in variables if name.startswith(_OURS)}
        shapes = {name: x.shape for name, x in variables.items() if name not in ours}
        mine = (name for name in ours if not name.startswith(_TAGS))
        attached = {name.removeprefix(_OURS): variables[name][...] for name in mine}
        values = tuple(variables[name][...] for name, _ in place.parameters)
        call = _read(method, self, args, kwargs, shapes, place.options)
        parameters = dict(place.parameters)
        if place.wrapper is not None:
            call = f"its parameters are reparametrised by {place.wrapper}"
        elif not isinstance(call, str) and not {*call.spec.parameters} <= {*parameters}:
            call = "only some of its parameters are nnx.Param"
        return capture(call, CallSite(place.path, parameters, shapes, attached, values), out)

    return observed


def _read(
    method: LayerMethod, layer: Any, args: tuple, kwargs: Any, shapes: Any, options: Options
) -> Any:
    """A call of a layer, read by the reader of its method."""
    bound = method.bind(layer, args, kwargs)

    def without_affine() -> jax.Array:
        bare = nnx.clone(layer)
        for name in ("scale", "bias"):
            setattr(bare, name, None)
        return _ORIGINALS[method](bare, *bound.args[1:], **bound.kwargs)

    kind, inputs = method.layer.__name__, bound.args[1]
    return method.read(ModuleCall(kind, inputs, shapes, options, layer, bound, without_affine))


# The methods of layers as Flax has them.
_ORIGINALS: dict[LayerMethod, Callable[..., Any]] = {
    method: getattr(method.layer, method.name)
    for methods in readers.NNX.values()
    for method in methods
}
_functions = threading.Lock()
_open_functions = 0


@contextlib.contextmanager
def layers_in_function() -> Iterator[None]:
    """While it is open, a layer observes itself if its parameters are tagged leaves.

    A function makes its NNX modules itself, of Flax's own classes, so for this while the methods of
    layers are ours. For any layer whose parameters are arrays, also in other threads, they are what
    they were.
    """
    global _open_functions  # noqa: PLW0603
    with _functions:
        _open_functions += 1
        if _open_functions == 1:
            for method in _ORIGINALS:
                setattr(method.layer, method.name, _method_in_function(method))
    try:
        yield
    finally:
        with _functions:
            _open_functions -= 1
            if _open_functions == 0:
                for method, original in _ORIGINALS.items():
                    setattr(method.layer, method.name, original)


@functools.cache
def _method_in_function(method: LayerMethod) -> Callable[..., Any]:
    """A method of a layer whose output is observed if its parameters are tagged leaves."""
    original = _ORIGINALS[method]

    @functools.wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        variables = {name: x for name, x in vars(self).items() if isinstance(x, nnx.Variable)}
        leaves = {name: x.get_raw_value() for name, x in variables.items()}
        site = tagged_site(leaves)
        if site is None:
            return out
        options = leaves[next(iter(site.parameters))].options
        return capture(_read(method, self, args, kwargs, site.shapes, options), site, out)

    return observed
