"""Whether examples depend on each other: read from a program that is traced for unusual lengths.

The program's batches have lengths that are prime and that nothing else in it has, so that an axis
whose length is a multiple of one *is* a batch's, alone or merged with later axes. What is asked of
every equation is that it keeps this axis as it is: entry n of the results is made from entry n of
the operands and from what all examples share. An equation that is not known here is taken to mix.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from kldwrm_jax.capture.dependence import programs_among
from kldwrm_jax.curvature.layer_spec import Shape


def keeps_examples_apart(
    program: ClosedJaxpr, lengths: Sequence[int], *, normalised: bool = False
) -> bool:
    """Whether no equation of a program mixes entries along its batches' axes.

    Args:
      program: the traced model.
      lengths: of its batches: primes that divide no other length in it.
      normalised: lets sums and maxima over the examples pass, as normalisation layers take them.
    """
    return _Reader(lengths, normalised).keeps_apart(program.jaxpr, program.consts)


class _Step(NamedTuple):
    """An equation, and where its operands and results have the axis of a batch, None if nowhere."""

    params: Mapping[str, Any]
    shapes: list[Shape]  # of the operands
    results: list[Shape]
    before: list[int | None]  # the place of the axis in the operands
    after: list[int | None]  # and in the results

    @property
    def places(self) -> set[int]:
        """Where the operands have it."""
        return {place for place in self.before if place is not None}


class _Reader:
    def __init__(self, lengths: Sequence[int], normalised: bool):
        self._lengths, self._normalised = lengths, normalised
        self._known: dict[int, bool] = {}  # what was found of programs, by identity

    def keeps_apart(self, jaxpr: Jaxpr, constants: Sequence[Any] = ()) -> bool:
        """Whether a program, and those inside it, keep the axis as it is."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = all(map(self._keeps, _needed(jaxpr)))
        # A table as long as the batch says which example is where.
        return self._known[id(jaxpr)] and not any(map(self._is_marked, constants))

    def _is_marked(self, constant: Any) -> bool:
        if np.ndim(constant) == 0:
            return self._is_length(constant)
        return bool(self._places(np.shape(constant)))

    def _is_length(self, x: Any) -> bool:
        """Whether a number tells how many examples there are, as a factor 1 / n does."""
        if self._normalised or isinstance(x, jax.core.Tracer) or not _is_real(x):
            return False
        tells = [f(n) for n in map(float, self._lengths) for f in _OF_A_LENGTH]
        return bool(np.isclose(tells, abs(float(x)), rtol=1e-6, atol=0).any())

    def _places(self, shape: Shape) -> list[int]:
        """The axes that contain a batch's; one that contains two, twice."""
        own = [(i, n) for i, n in enumerate(shape) if n > 0]
        squares = [i for i, n in own for p in self._lengths if n % p**2 == 0]
        return [i for i, n in own for p in self._lengths if n % p == 0] + squares

    def _keeps(self, equation: Any) -> bool:
        shapes, results = (
            [tuple(getattr(x.aval, "shape", ())) for x in variables]
            for variables in (equation.invars, equation.outvars)
        )
        literals = (x.val for x in equation.invars if isinstance(x, Literal))
        marks = [self._places(shape) for shape in (*shapes, *results)]
        if any(len(own) > 1 for own in marks) or any(map(self._is_length, literals)):
            return False
        places = [own[0] if own else None for own in marks]
        n, name = len(shapes), equation.primitive.name
        step = _Step(equation.params, shapes, results, places[:n], places[n:])
        touched = any(place is not None for place in places)
        if name in _RULES:
            rule = _RULES[name]
            return not touched or rule(step) or (self._normalised and rule is _reduction)
        if touched and name not in _CALLS.split():
            return False
        if name == "scan" and self._places((step.params["length"],)) and not _is_map(step):
            return False
        return all(self.keeps_apart(*own) for own in _with_constants(equation.params))


def _needed(jaxpr: Jaxpr) -> list[Any]:
    """Those that the outputs depend on: not a sum of which only the gradient is used."""
    needed, equations = {x for x in jaxpr.outvars if not isinstance(x, Literal)}, []
    for equation in reversed(jaxpr.eqns):
        if needed & {*equation.outvars}:
            needed |= {x for x in equation.invars if not isinstance(x, Literal)}
            equations.append(equation)
    return equations


_OF_A_LENGTH: list[Callable[[float], float]] = [float, lambda n: 1 / n, np.sqrt, lambda n: n**-0.5]


def _is_real(x: Any) -> bool:
    dtype = getattr(x, "dtype", type(x))
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def _with_constants(params: Any) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    closed = [x for x in jax.tree.leaves(dict(params)) if isinstance(x, ClosedJaxpr)]
    constants = {id(own.jaxpr): own.consts for own in closed}
    for own in programs_among(params):
        yield own, constants.get(id(own), ())


def _is_map(step: _Step) -> bool:
    """Whether a loop over the examples carries nothing from one to the next, as ``lax.map``."""
    constants = step.params["num_consts"]
    return step.params["num_carry"] == 0 and not any(
        place is not None for place in step.before[:constants]
    )


# --- What keeps the axis ------------------------------------------------------------------------

_Rule = Callable[[_Step], bool]


def _elementwise(step: _Step) -> bool:
    """Every entry from the operands' entries at the same place."""
    after = {*step.after}
    return None not in after and step.places <= after and len(after) == 1


def _apart_from(*names: str) -> _Rule:
    """Works along some axes, of operands and results that agree on all others."""

    def rule(step: _Step) -> bool:
        worked = {axis for name in names for axis in _axes(step.params[name])}
        return _elementwise(step) and not worked & {*step.places, *step.after}

    return rule


def _axes(value: Any) -> Sequence[int]:
    return [*value] if isinstance(value, tuple | list) else [value]


def _reduction(step: _Step) -> bool:
    axes = step.params["axes" if "axes" in step.params else "dimensions"]
    return None not in step.after and not step.places & {*axes}


def _last_axes(count: Callable[[Any], int]) -> _Rule:
    """Works on the last few axes, and is batched over those before."""

    def rule(step: _Step) -> bool:
        n = count(step.params)
        pairs = zip(step.before, step.shapes, strict=True)
        return _elementwise(step) and all(
            place is None or place < len(shape) - n for place, shape in pairs
        )

    return rule


def _same_length(step: _Step) -> bool:
    return _elementwise(step) and len({s[p] for s, p in _marked(step)}) == 1


def _marked(step: _Step) -> list[tuple[Shape, int]]:
    """The shapes that have the axis, and where."""
    pairs = zip((*step.shapes, *step.results), (*step.before, *step.after), strict=True)
    return [(shape, place) for shape, place in pairs if place is not None]


def _reshape(step: _Step) -> bool:
    """The axis may be merged with later axes and split off again, never with earlier ones."""
    if step.before == [None] or step.after == [None]:
        return False
    (shape,), (result,) = step.shapes, step.results
    order = list(step.params["dimensions"] or range(len(shape)))
    earlier = order[: order.index(step.before[0])]
    return math.prod(shape[i] for i in earlier) == math.prod(result[: step.after[0]])


def _tile(step: _Step) -> bool:
    return _same_length(step) and all(step.params["reps"][i] == 1 for i in step.places)


def _still_there(step: _Step) -> bool:
    """Moves axes or adds some."""
    return None not in step.after


def _slice(step: _Step) -> bool:
    (place,) = step.places
    strides = step.params["strides"]
    return _same_length(step) and (strides is None or strides[place] == 1)


def _pad(step: _Step) -> bool:
    configuration = step.params["padding_config"]
    return _same_length(step) and all(tuple(configuration[i]) == (0, 0, 0) for i in step.places)


def _dot(step: _Step) -> bool:
    contracted, _ = step.params["dimension_numbers"]
    pairs = zip(step.before, contracted, strict=True)
    return None not in step.after and all(place not in {*axes} for place, axes in pairs)


def _convolution(step: _Step) -> bool:
    numbers = step.params["dimension_numbers"]
    return (
        step.before == [numbers.lhs_spec[0], None]
        and step.after == [numbers.out_spec[0]]
        and step.params["batch_group_count"] == 1
    )


def _window(step: _Step) -> bool:
    """A window that sees one example."""
    places = {*step.places, *step.after}
    trivial: dict[str, Any] = {
        "window_dimensions": 1,
        "window_strides": 1,
        "base_dilation": 1,
        "window_dilation": 1,
        "padding": (0, 0),
    }
    given = {name: own for name, own in trivial.items() if name in step.params}
    return _elementwise(step) and all(
        (tuple(x) if isinstance(x, tuple | list) else x) == own
        for name, own in given.items()
        for x in [step.params[name][place] for place in places]
    )


def _gather(step: _Step) -> bool:
    """The same entries of every example, or each example its own."""
    numbers, (place, indices) = step.params["dimension_numbers"], step.before
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    if None in step.after or indices == len(step.shapes[1]) - 1:
        return False
    if place is None or (place, indices) in {*pairs}:
        return True
    # With indices of each example's own, too, the result would have the axis twice.
    return step.params["slice_sizes"][place] == step.shapes[0][place]


def _scatter(step: _Step) -> bool:
    """To the same entries of every example, or of each example to its own."""
    numbers, (place, indices, updates) = step.params["dimension_numbers"], step.before
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    if place is None:
        return False  # examples add up to what all share
    if place in numbers.operand_batching_dims:
        return (place, indices) in {*pairs}
    missing = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    if indices is not None or place in missing:
        return False
    kept = [i for i in range(len(step.shapes[0])) if i not in missing]
    window = numbers.update_window_dims[kept.index(place)]
    whole = step.shapes[2][window] == step.shapes[0][place]
    return whole and updates == window


def _shares_no_place(step: _Step) -> bool:
    """Counts along another axis: where an example is in the batch says nothing of it."""
    return step.after != [step.params["dimension"]]


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
le_to lt_to
integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or
polygamma population_count pow pvary pcast random_bits random_clone random_fold_in random_gamma
random_seed random_split random_unwrap random_wrap real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
"""
_REDUCTIONS = """
argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
"""
_WINDOWS = """
reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
select_and_scatter_add
"""
_CUMULATIVE = "cumlogsumexp cummax cummin cumprod cumsum split"
_MATRICES = "cholesky eigh householder_product lu qr svd triangular_solve"
_SCATTERS = "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add"

# Run programs of their own on the same arrays, or on slices of them.
_CALLS = """
call checkpoint closed_call cond core_call custom_jvp_call custom_linear_solve custom_vjp_call
custom_vjp_call_jaxpr jit pjit remat remat2 scan while
"""

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(_WINDOWS.split(), _window),
    **dict.fromkeys(_CUMULATIVE.split(), _apart_from("axis")),
    **dict.fromkeys(_MATRICES.split(), _last_axes(lambda params: 2)),
    **dict.fromkeys(_SCATTERS.split(), _scatter),
    "broadcast_in_dim": _still_there,
    "concatenate": _apart_from("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _same_length,
    "dynamic_update_slice": lambda step: _same_length(step) and step.before[1] is not None,
    "expand_dims": _still_there,
    "fft": _last_axes(lambda params: len(params["fft_lengths"])),
    "gather": _gather,
    "iota": _shares_no_place,
    "optimization_barrier": lambda step: step.before == step.after,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _apart_from("dimensions"),
    "slice": _slice,
    "sort": _apart_from("dimension"),
    "squeeze": _still_there,
    "tile": _tile,
    "top_k": _last_axes(lambda params: 1),
    "transpose": _still_there,
}
