"""What the outputs depend on, and through which layers: read from the traced program.

Every variable of the program carries the *origins* of its value: parameters, by path, whose use no
layer has observed so far, and layers, by path, whose observed output it depends on. What passes
``observe`` has been counted as part of its layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from kldwrm_jax.capture.observe import ObserveParams
from kldwrm_jax.capture.trace import Path


class Stopped(NamedTuple):
    """An origin behind a ``stop_gradient``: no derivative comes back to it."""

    origin: Any


Origin = str | Path | Stopped
Origins = frozenset[Any]  # of Origin
_NOTHING: Origins = frozenset()


class Dependence(NamedTuple):
    """What the outputs depend on."""

    origins: Origins  # of the outputs
    inside: frozenset[str]  # parameters whose use in their own layer was observed
    outside: frozenset[str]  # parameters with another use, too, that the outputs depend on


def find_dependence(
    program: ClosedJaxpr, inputs: Sequence[Origins], layers: Mapping[Path, Sequence[str]]
) -> Dependence:
    """The origins of a program's outputs.

    Args:
      program: of a model with probes.
      inputs: the origins of its operands: a parameter's path, the path of a probe's layer.
      layers: the paths of every layer's parameters.
    """
    reader = _Reader(layers)
    outputs = _union(reader.run(program.jaxpr, inputs))
    outside = (reader.fed_back | {origin for origin in outputs if isinstance(origin, str)}) & {
        path for own in layers.values() for path in own
    }
    # A bias that is added after its tag has no use inside. Of a layer that is used backwards, too,
    # a use outside cannot be told from that.
    inside = frozenset(reader.inside)
    return Dependence(outputs, inside, (outside & inside) - reader.backwards)


class _Reader:
    """Carries origins through a program."""

    def __init__(self, layers: Mapping[Path, Sequence[str]]):
        self._layers = layers
        self.inside: set[str] = set()
        self.fed_back: frozenset[str] = frozenset()  # reach the inputs of their own layer
        self.backwards: frozenset[str] = frozenset()  # of layers in a reverse-mode derivative

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Origins]) -> list[Origins]:
        """The origins of a program's outputs from those of its inputs."""
        known: dict[Any, Origins] = dict(zip(jaxpr.invars, inputs, strict=True))

        def origins(x: Any) -> Origins:
            return _NOTHING if isinstance(x, Literal) else known.get(x, _NOTHING)

        for equation in jaxpr.eqns:
            made = self._apply(equation, [origins(x) for x in equation.invars])
            for x, own in zip(equation.outvars, made, strict=True):
                dtype = getattr(x.aval, "dtype", bool)
                known[x] = own if jnp.issubdtype(dtype, jnp.inexact) else _NOTHING
        return [origins(x) for x in jaxpr.outvars]

    def _apply(self, equation: Any, operands: list[Origins]) -> Sequence[Origins]:
        if equation.primitive.name == "stop_gradient":
            stopped = (x if isinstance(x, Stopped) else Stopped(x) for x in operands[0])
            return [frozenset(stopped)]
        params = equation.params.get("params")
        if isinstance(params, ObserveParams):
            made = self._exchanged if len(equation.outvars) == 2 else self._observed
            return made(params, operands)
        n = len(equation.outvars)
        bodies = [own for own in programs_among(equation.params) if len(own.outvars) == n]
        if not bodies or any(len(own.invars) > len(operands) for own in bodies):
            return [_union(operands)] * n
        return self._run_bodies(equation, bodies, operands)

    def _observed(self, params: ObserveParams, operands: list[Origins]) -> list[Origins]:
        z, probes, inputs, *_ = params.split(operands)
        layers, own = self._of_probes(probes)
        self.inside |= z & own
        self.fed_back |= {getattr(x, "origin", x) for x in inputs} & own
        return [(z - own) | layers]

    def _exchanged(self, params: ObserveParams, operands: list[Origins]) -> list[Origins]:
        """``exchange``: the product with the kernel that it stands for comes after it."""
        layers, own = self._of_probes(operands[1 : 1 + len(params.probes)])
        self.backwards |= own
        return [operands[0] | layers, layers]

    def _of_probes(self, probes: Sequence[Origins]) -> tuple[Origins, Origins]:
        """The layers of some probes, and their parameters."""
        layers = frozenset(origin for origin in _union(probes) if isinstance(origin, tuple))
        return layers, frozenset(path for own in layers for path in self._layers.get(own, ()))

    def _run_bodies(
        self, equation: Any, bodies: Sequence[Jaxpr], operands: list[Origins]
    ) -> list[Origins]:
        """The programs inside an equation; those of loops until nothing is new.

        A program takes the last operands: before them are the index of a ``cond``, the constants
        of a loop's condition.
        """
        name, n = equation.primitive.name, len(equation.outvars)
        carried = {"scan": equation.params.get("num_carry"), "while": n}.get(name, 0)
        first = equation.params["num_consts"] if name == "scan" else len(operands) - n
        while True:
            runs = [self.run(own, operands[len(operands) - len(own.invars) :]) for own in bodies]
            outputs = [_union(own) for own in zip(*runs, strict=True)]
            fed = list(operands)
            for i in range(carried):
                fed[first + i] = operands[first + i] | outputs[i]
            if fed == operands:
                return outputs
            operands = fed


def programs_among(value: Any) -> Iterator[Jaxpr]:
    """The programs among an equation's parameters."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, Mapping):
        for own in value.values():
            yield from programs_among(own)
    elif isinstance(value, tuple | list):
        for own in value:
            yield from programs_among(own)


def _union(origins: Sequence[Origins]) -> Origins:
    return _NOTHING.union(*origins)
