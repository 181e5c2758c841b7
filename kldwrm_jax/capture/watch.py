"""Watch: what is met while a model runs. Bookkeeping of one trace, and never data.

What a layer collects travels with its parameters, in what is *carried* beside them: probes, and the
samples' weights. A function that is compiled already is not traced again and its layers are not met
here, and yet observed.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

import jax

from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Reading, Role

Path = tuple[str, ...]
Shape = tuple[int, ...]

_WEIGHTS = "weights"
_MARK = "mark"
# Arrays of lengths that no stack has, one for every number of axes that parameters and probes have.
_MARK_LENGTHS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)


@dataclasses.dataclass
class Watch:
    """What was met, by the paths of layers.

    Args:
      roles: of every call of a layer.
      parameters: the layer's parameters, by the names that its roles give them.
      shapes: of the parameters, inside whatever transforms the model.
      arrived: shapes of what is carried beside them, there.
      modules: types of modules, for people.
      refused: why a layer has no role.
      mixing: layers in which examples depend on each other.
    """

    roles: dict[Path, list[Role]] = dataclasses.field(default_factory=dict)
    parameters: dict[Path, dict[str, str]] = dataclasses.field(default_factory=dict)
    shapes: dict[Path, dict[str, Shape]] = dataclasses.field(default_factory=dict)
    arrived: dict[Path, dict[str, Shape]] = dataclasses.field(default_factory=dict)
    modules: dict[Path, str] = dataclasses.field(default_factory=dict)
    refused: dict[Path, str] = dataclasses.field(default_factory=dict)
    mixing: list[Path] = dataclasses.field(default_factory=list)

    def note(
        self,
        path: Path,
        role: Role,
        parameters: Mapping[str, str],
        shapes: Mapping[str, Shape],
        carried: Probes,
    ) -> None:
        """A call of a layer; two that share a part of their parameters are refused."""
        if self.parameters.setdefault(path, dict(parameters)) != dict(parameters):
            both = {*self.parameters[path].values(), *parameters.values()}
            for parameter in both:
                self.refused[tuple(parameter.split("/")[:-1])] = (
                    "it shares some of its parameters with another layer"
                )
            self.refused[path] = "it shares some of its parameters with another layer"
        self.roles.setdefault(path, []).append(role)
        self.shapes[path] = dict(shapes)
        self.arrived[path] = {name: x.shape for name, x in carried.items()}


def observed(reading: Reading, z: jax.Array, carried: Probes) -> jax.Array:
    """A layer's output, seen by what is carried beside its parameters."""
    probes = {k: v for k, v in carried.items() if not k.startswith((_WEIGHTS, _MARK))}
    if not probes:
        return z
    weights = None
    for name, x in carried.items():
        if name.startswith(_WEIGHTS):
            weights = x.reshape(x.shape[: int(name.removeprefix(_WEIGHTS))])
    return reading.observed(z, probes, weights)


def carried_weights(weights: jax.Array) -> Probes:
    """Weights as they are carried: of two axes at least, their number in the name."""
    padded = weights.reshape(weights.shape + (1,) * max(0, 2 - weights.ndim))
    return {f"{_WEIGHTS}{weights.ndim}": padded}


def marks(ranks: set[int]) -> dict[str, Shape]:
    """Shapes that occur nowhere else, to see how what is carried arrives."""
    return {f"{_MARK}{rank}": _MARK_LENGTHS[:rank] for rank in {2, 3} | ranks}


_current: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("watch", default=None)


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Has the layers that are traced meanwhile, in this thread, note themselves."""
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)


def current_watch() -> Watch | None:
    """The watch of the model that is being traced, if any."""
    return _current.get()
