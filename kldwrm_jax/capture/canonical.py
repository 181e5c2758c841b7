"""Convolutions in the layout that XLA compiles well inside of a branch.

On a CPU, XLA has fast kernels for convolutions of (batch, places, channels) with kernels of
(places, inputs, outputs). Outside of branches and loops it brings others into this layout. Inside,
where a refresh is, it does not: the gradient of a convolution, whose kernel has its inputs and
outputs exchanged, becomes a plain loop that is up to twenty times slower. So the transposes are
written out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

_CALLS = ("pjit", "jit", "closed_call", "remat2", "checkpoint")


def canonical_convolutions(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the convolutions of its program in the canonical layout."""

    def canonical(*args: Any) -> Any:
        program, out = jax.make_jaxpr(function, return_shape=True)(*args)
        if _convolves(program.jaxpr):
            results = _evaluate(program.jaxpr, program.consts, jax.tree.leaves(args))
        else:
            results = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return canonical


def _convolves(jaxpr: Jaxpr) -> bool:
    """Whether a program has a convolution that :func:`_evaluate` would meet."""
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr") if equation.primitive.name in _CALLS else None
        if equation.primitive.name == "conv_general_dilated":
            return True
        if isinstance(inner, ClosedJaxpr) and _convolves(inner.jaxpr):
            return True
    return False


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Runs a program, equation by equation."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands, inner = map(read, equation.invars), equation.params.get("jaxpr")
        if equation.primitive.name == "conv_general_dilated":
            results = [_convolve(*operands, **equation.params)]
        elif equation.primitive.name in _CALLS and isinstance(inner, ClosedJaxpr):
            results = _evaluate(inner.jaxpr, inner.consts, [*operands])
        else:
            results = _evaluate_plainly(jaxpr, equation, [*operands])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _evaluate_plainly(jaxpr: Jaxpr, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """One equation, as a program of its own."""
    given = {
        variable: operand
        for variable, operand in zip(equation.invars, operands, strict=True)
        if not isinstance(variable, Literal)
    }
    program = jaxpr.replace(
        constvars=[], invars=[*given], outvars=equation.outvars, eqns=[equation]
    )
    return jax.core.eval_jaxpr(program, [], *given.values())


def _convolve(lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Any, **params: Any) -> Any:
    n = lhs.ndim
    first, last = (0, n - 1, *range(1, n - 1)), (n - 1, n - 2, *range(n - 2))  # N C ..., O I ...
    lhs_spec, rhs_spec, out_spec = dimension_numbers

    def moved(x: jax.Array, spec: Sequence[int], wanted: Sequence[int]) -> jax.Array:
        order = [spec[list(wanted).index(axis)] for axis in range(n)]
        return jnp.transpose(x, order)

    canonical = jax.lax.ConvDimensionNumbers(first, last, first)
    params = {k: v for k, v in params.items() if k in _ARGUMENTS}
    out = jax.lax.conv_general_dilated(
        moved(lhs, lhs_spec, first),
        moved(rhs, rhs_spec, last),
        dimension_numbers=canonical,
        **params,
    )
    return moved(out, first, out_spec)


_ARGUMENTS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count"),
    *("batch_group_count", "precision", "preferred_element_type"),
)
