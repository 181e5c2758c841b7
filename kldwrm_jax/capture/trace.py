"""What one trace of a model meets: which layers are called, how, and with which parameters.

Bookkeeping of a trace, never data: statistics travel through the arrays that are *attached* beside
a layer's parameters. The layers of a function that is compiled already are not met, and yet
observed.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from kldwrm_jax.capture.layer_call import LayerCall
from kldwrm_jax.capture.observe import Derivative, observe
from kldwrm_jax.capture.stack import Stack
from kldwrm_jax.curvature.layer_spec import Arrays, LayerSpec, Shape

Path = tuple[str, ...]
Attached = Mapping[Path, Arrays]  # arrays beside the parameters of layers

# What is attached beside a layer's parameters. Sentinels show by their shapes how they are sliced.
PROBE, CONSTANT, SENTINEL = "probe:", "constant:", "sentinel:"


class CallSite(NamedTuple):
    """Where in the model a layer is called."""

    path: Path
    parameters: Mapping[str, str]  # paths, by the names that the layer gives them
    shapes: Mapping[str, Shape]  # of the parameters, inside whatever transforms the model
    attached: Mapping[str, Any]  # arrays; in a record, their shapes
    values: tuple[Any, ...] = ()  # the parameters' arrays; none in a record


@dataclasses.dataclass
class TraceRecord:
    """The calls of layers by path, and what else is known of them."""

    calls: dict[Path, list[tuple[LayerSpec, CallSite]]] = dataclasses.field(default_factory=dict)
    module_types: dict[Path, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # reasons, by parameter
    mixing: list[Path] = dataclasses.field(default_factory=list)  # layers that mix examples
    derivatives: dict[Path, set[Derivative]] = dataclasses.field(default_factory=dict)
    # While the trace lasts: what a tag is given as a TaggedLeaf, None if it is no parameter.
    find_leaf: Callable[[Any], Any] | None = None
    read_variables: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # and owners

    def add(self, call: LayerCall, site: CallSite) -> None:
        """A call; two layers that share some but not all of their parameters are refused."""
        names, met = call.spec.parameters, self.calls.setdefault(site.path, [])
        site = site._replace(
            parameters={name: site.parameters[name] for name in names},
            shapes={name: site.shapes[name] for name in names},
            attached={name: x.shape for name, x in site.attached.items()},
            values=(),
        )
        if met and met[0][1].parameters != site.parameters:
            both = (*met[0][1].parameters.values(), *site.parameters.values())
            self.refuse(both, "it shares some of its parameters with another layer")
        met.append((call.spec, site))
        if call.mixes_examples:
            self.mixing.append(site.path)

    def refuse(self, parameters: Iterable[str], reason: str) -> None:
        """Parameters that get no Kronecker block, and why."""
        self.refused |= dict.fromkeys(parameters, reason)


def capture(call: LayerCall | str, site: CallSite, z: jax.Array) -> jax.Array:
    """The output ``z`` of a call, observed by the probes that are attached to its layer.

    The call joins the record of this trace, if there is one. A string says why a layer can have
    no block.
    """
    record = current_record() or TraceRecord()
    if isinstance(call, str):
        record.refuse(site.parameters.values(), call)
        return z
    record.add(call, site)

    def having(prefix: str) -> Arrays:
        own = {k.removeprefix(prefix): x for k, x in site.attached.items() if k.startswith(prefix)}
        return Stack().detach(own)

    probes = having(PROBE)
    if probes:
        return observe(call.collector, z, call.inputs(), probes, having(CONSTANT))
    if not _surveying.get():
        return z
    met = record.derivatives.setdefault(site.path, set())
    parameters = {str(i): value for i, value in enumerate(site.values)}
    return observe(call.collector, z, call.inputs(), parameters, {}, met.add)


_surveying: contextvars.ContextVar[bool] = contextvars.ContextVar("kldwrm_survey", default=False)
_current: contextvars.ContextVar[TraceRecord | None] = contextvars.ContextVar(
    "kldwrm_trace_record", default=None
)
current_record = _current.get  # the record of the model that is being traced, if any


@contextlib.contextmanager
def surveying() -> Iterator[None]:
    """Records the derivatives of layers that are traced meanwhile in this thread, too."""
    token = _surveying.set(True)
    try:
        yield
    finally:
        _surveying.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[TraceRecord]:
    """Records the calls of layers that are traced meanwhile in this thread."""
    record = TraceRecord()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)
        record.find_leaf = None
        record.read_variables.clear()
