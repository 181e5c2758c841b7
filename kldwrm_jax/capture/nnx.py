"""Flax NNX models: finding their layers, and running them with probes beside the parameters.

A model is run on a copy that is made for the run and dropped after it. On the copy, a layer is of a
subclass of its own class that passes its output through the observation, and carries the probes as
variables whose type derives from its kernel's: so filters by type, ``nnx.scan``, ``nnx.vmap`` and
``nnx.remat`` treat them as they treat the kernel. The user's model and every class stay as they
are.
"""

import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.model import Model
from kldwrm_jax.capture.nnx_layers import READERS, REPARAMETRISATIONS, Reader, mixes_examples
from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Options
from kldwrm_jax.capture.sites import survey
from kldwrm_jax.capture.watch import Path, Watch, current_watch, observed, watching
from kldwrm_jax.paths import leaves_by_path

_CARRIED = "kldwrm_"
_PARAMETERS = ("kernel", "embedding", "scale", "bias")  # a layer is where the first of them is
_surveys = itertools.count()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer is in its model. Static: compiled functions are of one place, and one run.

    Args:
      path: of the layer's parameters.
      parameters: their paths, by the names that the layer gives them.
      options: how the layer is read.
      label: the kind of run.
      carried: names of what is carried beside the parameters.
      wrapper: what reparametrises the layer, if anything does.
    """

    path: Path
    parameters: tuple[tuple[str, str], ...]
    options: Options
    label: str
    carried: tuple[str, ...]
    wrapper: str | None


def _observing(original: Callable[..., Any], reader: Reader) -> Callable[..., Any]:
    """A layer's method that passes its output through the observation."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        place: Place = self.kldwrm_place
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        reading = reader(self, call, place.options)
        if place.wrapper is not None:
            reading = f"its parameters are reparametrised by {place.wrapper}"
        watch = current_watch()
        if watch is not None:
            watch.modules[place.path] = type(self).__name__
        parameters = dict(place.parameters)
        if not isinstance(reading, str) and not {*reading.role.parameters} <= {*parameters}:
            reading = "only some of its parameters are nnx.Param"
        if isinstance(reading, str):
            if watch is not None:
                watch.refused[place.path] = reading
            return out
        carried = {name: getattr(self, _CARRIED + name)[...] for name in place.carried}
        if watch is not None:
            parameters = {name: parameters[name] for name in reading.role.parameters}
            shapes = {name: getattr(self, name).shape for name in parameters}
            watch.note(place.path, reading.role, parameters, shapes, carried)
            if mixes_examples(self, call):
                watch.mixing.append(place.path)
        return observed(reading, out, carried)

    return method


@functools.cache
def _observed_layer(layer: type) -> type:
    methods = {
        name: _observing(getattr(layer, name), read) for name, read in READERS[layer].items()
    }
    return _subclass(layer, (layer,), methods)


@functools.cache
def _observed_class(cls: type) -> type:
    """A subclass that observes what a class does through the calls of its base, a known layer."""
    layer = next(base for base in cls.__mro__ if base in READERS)
    observed = _observed_layer(layer)
    return observed if cls is layer else _subclass(cls, (cls, observed), {})


@functools.cache
def _carried_type(variable: type) -> type:
    return _subclass(variable, (variable,), {})


def _subclass(cls: type, bases: tuple[type, ...], methods: dict[str, Any]) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, bases, {}, lambda ns: ns.update(names | methods))


def _is_layer(module: Any) -> bool:
    return any(base in READERS for base in type(module).__mro__)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a model, its parameters' paths by name, and what reparametrises it."""

    module: nnx.Module
    path: Path
    parameters: dict[str, str]
    wrapper: str | None


def _layers(model: nnx.Module) -> list[Layer]:
    """Every layer, where its parameters are; those that share all of them are at one path."""
    where: dict[int, Path] = {}
    for keys, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        where[id(_at(model, keys))] = tuple(map(str, keys))
    modules = list(nnx.iter_modules(model))
    wrappers = [(path, m) for path, m in modules if isinstance(m, REPARAMETRISATIONS)]
    found = []
    for keys, module in modules:
        if not _is_layer(module):
            continue
        own = {
            name: where[id(value)]
            for name, value in vars(module).items()
            if isinstance(value, nnx.Variable) and id(value) in where
        }
        path: Path = tuple(map(str, keys))
        first = next((own[name][:-1] for name in _PARAMETERS if name in own), path)
        within = [type(m).__name__ for outer, m in wrappers if keys[: len(outer)] == outer]
        found.append(
            Layer(
                module,
                first,
                {name: "/".join(p) for name, p in own.items()},
                within[0] if within else None,
            )
        )
    return found


def _at(node: Any, path: Sequence[Any]) -> Any:
    for key in path:
        named = isinstance(key, str) and hasattr(node, key)
        node = getattr(node, key) if named else node[key]
    return node


def _observe_layers(
    model: nnx.Module, options: Options, label: str, carried: Mapping[Path, Mapping[str, Any]]
) -> None:
    """Makes a model's layers, which are nobody else's, note and observe themselves."""
    for layer in _layers(model):
        module: Any = layer.module
        own = carried.get(layer.path, {})
        cls: Any = type(module)
        variable: Any = next((type(getattr(module, name)) for name in layer.parameters), nnx.Param)
        object.__setattr__(module, "__class__", _observed_class(cls))
        module.kldwrm_place = Place(
            layer.path,
            tuple(sorted(layer.parameters.items())),
            options,
            label,
            tuple(own),
            layer.wrapper,
        )
        for name, x in own.items():
            setattr(module, _CARRIED + name, _carried_type(variable)(x))


def _values(tree: Any) -> Any:
    """A tree without its variables' types, which Flax before 0.12.7 has no function for."""
    return jax.tree.map(
        lambda x: x.get_raw_value() if isinstance(x, nnx.Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def _merged(params: Any, call: Call) -> nnx.Module:
    """A model of its own, with these parameters."""
    return nnx.merge(call.graph, _values(params), call.variables, copy=True)


def _run(model: Any, call: Call) -> tuple[Any, Any]:
    kwargs = dict(call.kwargs)
    if isinstance(call.rngs, Mapping):
        kwargs["rngs"] = nnx.Rngs(**call.rngs)
    elif call.rngs is not None:
        kwargs["rngs"] = nnx.Rngs(call.rngs)
    out = model(*call.args, **kwargs)
    return out, _values(nnx.state(model, nnx.Not(nnx.Param)))


@dataclasses.dataclass(frozen=True, eq=False)
class NNXModel(Model):
    """An NNX module, of which only the structure is kept.

    Args:
      graph: the structure.
      others: paths of its variables that are no parameters.
    """

    graph: Any
    others: tuple[str, ...]

    def run(self, params: Any, call: Call) -> tuple[Any, Any]:
        """On a copy: variables are updated there."""
        return _run(_merged(params, call), call)

    def observed_run(
        self, params: Any, call: Call, carried: Mapping[Path, Probes]
    ) -> tuple[Any, Any, Watch]:
        """On a copy whose layers carry the probes."""
        model = _merged(params, call)
        _observe_layers(model, self.options, "observed", carried)
        with watching(Watch()) as watch:
            out, variables = _run(model, call)
        return out, variables, watch

    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """The model itself, as it is now; or its parameters and, if it has any, other variables."""
        graph: Any = self.graph
        rest: Any = nnx.State({})
        if isinstance(params, nnx.Module):
            graph, params, rest = _split(params)
            self._check_parameters(params)
        elif not call.variables and self.others:
            raise ValueError(
                f"the model has variables that are no parameters ({', '.join(self.others)}): give "
                f"net.oracle the model itself, or variables=nnx.state(model, nnx.Not(nnx.Param))"
            )
        rest = _values(call.variables) if call.variables else rest
        return params, dataclasses.replace(call, variables=rest, graph=graph)

    def _check_parameters(self, params: Any) -> None:
        known, here = self.layers.parameters.keys(), leaves_by_path(params).keys()
        if known != here:
            raise ValueError(
                f"the model has the parameters {', '.join(sorted(here))}, and it was instrumented "
                f"with {', '.join(sorted(known))}: call instrument with the model as it is now"
            )


def _split(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Structure, parameters and other variables: copies, so that the model may change."""
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    return graph, jax.tree.map(lambda x: x, params), _values(rest[0])


def survey_nnx(
    model: nnx.Module,
    output: Callable[[Any], jax.Array] | None,
    options: Options,
    call: Call,
) -> NNXModel:
    """Finds a model's layers by tracing an example call; nothing is computed."""
    graph, params, rest = _split(model)
    call = dataclasses.replace(call, variables=call.variables or rest, graph=graph)
    kinds = {
        tuple(map(str, path)): type(module).__name__ for path, module in nnx.iter_modules(model)
    }
    _check_bridges(model)

    def look(carried: Mapping[Path, Mapping[str, jax.ShapeDtypeStruct]]) -> Watch:
        label = f"survey {next(_surveys)}"

        def run(params: Any, call: Call, carried: Any) -> None:
            copy = _merged(params, call)
            _observe_layers(copy, options, label, carried)
            _run(copy, call)

        with watching(Watch()) as watch:
            jax.eval_shape(run, params, call, dict(carried))
        return watch

    def owner_of(parameter: str, watch: Watch) -> tuple[str, str]:
        owner = tuple(parameter.split("/")[:-1])
        kind = kinds.get(owner, "parameter")
        return kind, watch.refused.get(owner, f"there is no rule for {kind}")

    found, watch = survey(
        shapes={path: x.shape for path, x in leaves_by_path(params).items()},
        look=look,
        name_of=lambda path, _: "/".join(path) or "root",
        owner_of=owner_of,
    )
    others = tuple(leaves_by_path(rest))
    return NNXModel(output, options, found, tuple(watch.mixing), graph, others)


def _check_bridges(model: nnx.Module) -> None:
    bridged = [
        "/".join(map(str, path)) or "root"
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.bridge.ToNNX)
    ]
    if bridged:
        raise ValueError(
            f"{', '.join(map(repr, bridged))}: the layers of a Linen module behind "
            f"nnx.bridge.ToNNX are not seen. Instrument the Linen module itself, or write this "
            f"part in NNX"
        )
