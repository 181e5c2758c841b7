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
from kldwrm_jax.capture.model import Adapter, Model
from kldwrm_jax.capture.stack import Stack, find_stacks
from kldwrm_jax.capture.trace import SENTINEL, CallSite, Path, TraceRecord
from kldwrm_jax.curvature import Diagonal, LayerBlock, Layers, Parameter
from kldwrm_jax.curvature.layer_spec import LayerSpec, Shape
from kldwrm_jax.paths import leaves_by_path

Shapes = Mapping[str, Shape]  # of parameters, by path
Trace = Callable[[Mapping[Path, Any]], TraceRecord]

_labels = (f"survey {i}" for i in itertools.count())
_SENTINEL_LENGTHS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # that no model has


def survey(adapter: Adapter, output: Callable[[Any], Any] | None, call: Call) -> Model:
    """Finds a model's layers and gives every parameter a block; nothing is computed."""
    params, call = adapter.example(call)
    shapes = {path: x.shape for path, x in leaves_by_path(params).items()}

    def trace(attached: Mapping[Path, Any]) -> TraceRecord:
        label, records = next(_labels), []

        def run(params: Any, call: Call, attached: Any) -> None:
            records.append(adapter.run(params, call, attached, label)[2])

        jax.eval_shape(run, params, call, dict(attached))
        return records[-1]

    record = trace({})
    specs = _agreed_specs(record, shapes)
    sites = {path: record.calls[path][-1][1] for path in specs}
    stacks = _find_stacks(sites, shapes, trace)
    captured = [_captured(sites[path], spec, stacks[path], shapes) for path, spec in specs.items()]
    covered = {path for site in sites.values() for path in site.parameters.values()}
    uncovered = tuple(path for path in shapes if path not in covered)
    blocks = [block for layer in captured for block in layer.blocks]
    for path in uncovered:
        kind = record.module_types.get(tuple(path.split("/")[:-1]))
        reason = f"there is no rule for {kind}" if kind else "no tag or known layer uses it"
        note = f"{record.refused.get(path, reason)}: a diagonal from squared random-sign gradients"
        parameter, kind = Parameter(path, shapes[path]), kind or "parameter"
        blocks.append(LayerBlock(path, kind, Diagonal(), (parameter,), (shapes[path],), note))
    layers = Layers(tuple(blocks))
    return Model(adapter, output, layers, tuple(captured), uncovered, tuple(record.mixing))


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
