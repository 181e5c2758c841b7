"""The survey: which layers a model has, found by tracing an example call."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.captured_layer import CapturedLayer
from kldwrm_jax.capture.dependence import Dependence, find_dependence
from kldwrm_jax.capture.model import ONE, Adapter, Model
from kldwrm_jax.capture.observe import Derivative
from kldwrm_jax.capture.stack import Stack, find_stacks
from kldwrm_jax.capture.trace import SENTINEL, CallSite, Path, TraceRecord, surveying
from kldwrm_jax.curvature import Diagonal, LayerBlock, Layers, Parameter
from kldwrm_jax.curvature.layer_spec import Embedding, LayerSpec, Shape
from kldwrm_jax.likelihoods.terms import Structure
from kldwrm_jax.paths import leaves_by_path

Shapes = Mapping[str, Shape]  # of parameters, by path
Trace = Callable[[Mapping[Path, Any]], TraceRecord]

_labels = (f"survey {i}" for i in itertools.count())
_UNSEEN = (
    "the likelihood does not see it: no curvature, plain gradient steps. Train it with another "
    "optimizer through optax.partition, or let output= pick what it computes, too"
)
_SENTINEL_LENGTHS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # that no model has


def survey(
    adapter: Adapter,
    output: Callable[[Any], Any] | None,
    call: Call,
    structure: Structure = ONE,
) -> tuple[Model, Any]:
    """Finds a model's layers and gives every parameter a block; nothing is computed.

    Args:
      adapter: of the model.
      output: picks what the likelihoods see.
      call: an example.
      structure: of the likelihoods.

    Returns:
      The model, and the shapes of what the likelihoods see.
    """
    params, call = adapter.example(call)
    shapes = {path: x.shape for path, x in leaves_by_path(params).items()}

    empty = [f"{path!r} {shape}" for path, shape in shapes.items() if 0 in shape]
    if empty:
        raise ValueError(
            f"there are parameters without entries, {', '.join(empty)}: leave layers of width 0 out"
        )

    def trace(attached: Mapping[Path, Any]) -> TraceRecord:
        label, records = next(_labels), []

        def run(params: Any, call: Call, attached: Any) -> None:
            records.append(adapter.run(params, call, attached, label)[2])

        with surveying():
            jax.eval_shape(run, params, call, dict(attached))
        return records[-1]

    record = trace({})
    specs = _agreed_specs(record, shapes)
    sites = {path: record.calls[path][-1][1] for path in specs}
    specs = {path: _differentiated(sites[path], specs[path], record, shapes) for path in specs}
    stacks = _find_stacks(sites, shapes, trace)
    captured = [_captured(sites[path], spec, stacks[path], shapes) for path, spec in specs.items()]
    mixing = tuple(record.mixing)
    model = Model(adapter, output, Layers(()), tuple(captured), mixing=mixing, structure=structure)
    found, outputs = _find_dependence(model, params, call)
    for layer in captured:
        for path in {*layer.parameters} & found.outside:
            way_out = " (a tied head is counted if it calls attend)"
            own = way_out if isinstance(layer.spec, Embedding) else ""
            record.refuse(layer.parameters, f"{path} is also used outside its layer{own}")
    return _with_blocks(model, record, found, shapes), outputs


def _find_dependence(model: Model, params: Any, call: Call) -> tuple[Dependence, Any]:
    """What the outputs depend on, and their shapes."""
    label, probes = next(_labels), jax.eval_shape(model.probes)

    def outputs(params: Any, call: Call, probes: Any) -> Any:
        return model.observed_outputs(params, call, probes, label=label)[0]

    program, shape = jax.make_jaxpr(outputs, return_shape=True)(params, call, probes)
    origins = [frozenset([path]) for path in leaves_by_path(params)]
    origins += [frozenset()] * len(jax.tree.leaves(call))
    # Dicts are flattened in the order of their keys.
    for layer in sorted(probes):
        origins += [frozenset([layer])] * len(jax.tree.leaves(probes[layer]))
    parameters = {layer.path: layer.parameters for layer in model.captured}
    return find_dependence(program, origins, parameters), shape


def _with_blocks(model: Model, record: TraceRecord, found: Dependence, shapes: Shapes) -> Model:
    """The model with a block for every parameter."""

    def is_captured(layer: CapturedLayer) -> bool:
        return layer.path in found.origins and not {*layer.parameters} & record.refused.keys()

    captured = [layer for layer in model.captured if is_captured(layer)]
    covered = {path for layer in captured for path in layer.parameters}
    seen = {
        path for layer in model.captured if layer.path in found.origins for path in layer.parameters
    }
    seen |= {path for path in shapes if path in found.origins}
    if shapes and not seen:
        raise ValueError(
            "what the likelihood sees depends on none of the model's parameters: output must pick "
            "an array of floating-point numbers that the layers compute"
        )
    uncovered = tuple(path for path in shapes if path not in covered and path in seen)
    unseen = tuple(path for path in shapes if path not in covered and path not in seen)
    blocks = [block for layer in captured for block in layer.blocks]
    for path in (path for path in shapes if path not in covered):
        kind = record.module_types.get(tuple(path.split("/")[:-1]))
        if path in unseen:
            note = _UNSEEN
        else:
            reason = f"there is no rule for {kind}" if kind else "no tag or known layer uses it"
            reason = record.refused.get(path, reason)
            note = f"{reason}: a diagonal from squared random-sign gradients"
        blocks.append(
            LayerBlock(
                path,
                kind or "parameter",
                Diagonal(),
                (Parameter(path, shapes[path]),),
                (shapes[path],),
                note,
                unseen=path in unseen,
            )
        )
    return dataclasses.replace(
        model,
        layers=Layers(tuple(blocks)),
        captured=tuple(captured),
        uncovered=uncovered,
        unseen=unseen,
    )


def _agreed_specs(record: TraceRecord, shapes: Collection[str]) -> dict[Path, LayerSpec]:
    """What each layer is, if all its calls agree on it; parameters of others are refused."""
    own = {path: calls[0][1].parameters.values() for path, calls in record.calls.items()}
    claims = itertools.chain.from_iterable(own.values())
    for parameter in [p for p, n in collections.Counter(claims).items() if n > 1]:
        for path in [path for path in own if parameter in own[path]]:
            record.refuse(own[path], f"{parameter} belongs to another layer too")

    specs: dict[Path, LayerSpec] = {}
    for path, calls in record.calls.items():
        if not own[path] or any(p in record.refused or p not in shapes for p in own[path]):
            continue
        spec: LayerSpec | None = calls[0][0]
        for other, _ in calls[1:]:
            spec = spec and spec.merge(other)
        if spec is None:
            record.refuse(own[path], "it is called in different ways")
        else:
            specs[path] = spec
    return specs


def _differentiated(
    site: CallSite, spec: LayerSpec, record: TraceRecord, shapes: Shapes
) -> LayerSpec:
    """The description that collects what the model's derivatives add; or an error."""
    taken, name = record.derivatives.get(site.path, set()), _layer_name(site, shapes)
    if Derivative.BY_PARAMETERS in taken:
        raise NotImplementedError(
            f"the model takes a derivative by the parameters of {name!r} (or gives jax.jvp or "
            f"jax.grad a tree that holds them): statistics are collected of derivatives by its "
            f"inputs alone, such as jax.jvp(lambda x: network(params, x), (x,), (v,))"
        )
    if Derivative.PAST_INPUTS in taken:
        raise NotImplementedError(
            f"the output of {name!r} has a derivative that its input has not: give kw.tag the very "
            f"array that is multiplied with the kernel, without stop_gradient"
        )
    if Derivative.BACKWARDS not in taken:
        return spec
    try:
        return spec.used_backwards()
    except NotImplementedError as error:
        raise NotImplementedError(f"layer {name!r}: {error}") from None


def _find_stacks(sites: Mapping[Path, CallSite], shapes: Shapes, trace: Trace) -> dict[Path, Stack]:
    """How the parameters of each layer are stacked.

    Their shapes inside and outside the call suggest stacks, and wrong ones too where lengths
    coincide. So sentinels are sent along each: they must arrive as those of one copy.
    """

    def arriving(stacks: Mapping[Path, Stack]) -> dict[Path, Stack]:
        sent = {path: _sentinels(stack, sites[path]) for path, stack in stacks.items()}
        try:
            calls = trace(sent).calls
        except ValueError:  # a transform refuses arrays of these shapes: see which
            each = [arriving({path: stack}) for path, stack in stacks.items() if len(stacks) > 1]
            return dict(itertools.chain.from_iterable(own.items() for own in each))
        wanted = {path: _sentinels(Stack(), sites[path]) for path in stacks}
        shapes = {path: {k: x.shape for k, x in own.items()} for path, own in wanted.items()}
        return {
            path: s for path, s in stacks.items() if calls[path][-1][1].attached == shapes[path]
        }

    outside = {p: {k: shapes[v] for k, v in site.parameters.items()} for p, site in sites.items()}
    candidates = {path: find_stacks(site.shapes, outside[path]) for path, site in sites.items()}
    found = {path: own[0] for path, own in candidates.items() if own == [Stack()]}
    for i in range(max(map(len, candidates.values()), default=0)):
        left = {path: own for path, own in candidates.items() if path not in found}
        tried = {path: own[i] for path, own in left.items() if i < len(own)}
        found |= arriving(tried) if tried else {}
    for path in (path for path in sites if path not in found):
        raise ValueError(
            f"the parameters of {'/'.join(path)!r} are stacked in an unsupported way: "
            f"{sites[path].shapes} inside its lifted transform, {outside[path]} outside. Nested "
            f"scans and vmaps must stack along leading axes, as variable_axes={{'params': 0}} does"
        )
    return found


def _sentinels(stack: Stack, site: CallSite) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays of each rank that matters, of lengths that tell their axes apart."""
    ranks = {2, 3} | {len(shape) for shape in site.shapes.values()}
    shapes = {f"{SENTINEL}{rank}": _SENTINEL_LENGTHS[:rank] for rank in ranks}
    one = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return jax.eval_shape(stack.attach, one)


def _captured(site: CallSite, spec: LayerSpec, stack: Stack, shapes: Shapes) -> CapturedLayer:
    """A layer with its blocks at their place in the model."""
    name, paths, blocks = _layer_name(site, shapes), site.parameters, []
    for block in spec.blocks:
        places = [(paths[p.path], shapes[paths[p.path]], p.view) for p in block.parameters]
        parameters = tuple(Parameter(p, s, stack.axes(len(s)), view) for p, s, view in places)
        sides = tuple(stack.lengths + side for side in block.shapes)
        if isinstance(block.block, Diagonal):
            sides = (parameters[0].shape,)
        own_name = parameters[0].path if block.name else name
        blocks.append(
            dataclasses.replace(block, name=own_name, parameters=parameters, shapes=sides)
        )
    return CapturedLayer(site.path, name, spec, stack, tuple(blocks))


def _layer_name(site: CallSite, every: Iterable[str]) -> str:
    name, own = "/".join(site.path), {*site.parameters.values()}
    if name not in own:
        return name or "root"  # a module
    parent = name.rpartition("/")[0]  # of a tagged kernel: its place, if it has it for itself
    here = {path for path in every if path.startswith(f"{parent}/")}
    return parent if parent and here == own else name
