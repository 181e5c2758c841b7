"""Stacks of matrices: the same results however they are stacked, and no batched call of LAPACK."""

import re
import subprocess
import sys

import dense
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.curvature.sequential import sequential_on_cpu


def cholesky(m):
    return jax.lax.linalg.cholesky(m)


def eigh(m):
    vectors, values = jax.lax.linalg.eigh(m)
    return {"vectors": vectors, "values": values}


def whitened(m, n):
    half = jnp.linalg.inv(jax.lax.linalg.cholesky(m))
    return half @ n @ half.T


FUNCTIONS = {"cholesky": (cholesky, 1), "eigh": (eigh, 1), "of two": (whitened, 2)}
each_function = pytest.mark.parametrize(
    ("function", "arguments"), FUNCTIONS.values(), ids=FUNCTIONS
)


def assert_each(got, function, stack, *args):
    """Every matrix of the stack, compared with the plain function of it alone."""
    plain = jax.jit(function)
    for i in np.ndindex(*stack):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x[i], y, rtol=1e-10, atol=1e-12),
            got,
            plain(*(x[i] for x in args)),
        )


@pytest.mark.parametrize("stack", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@each_function
def test_a_stack_of_any_number_of_axes_is_done_matrix_by_matrix(
    function, arguments, stack, rng, x64
):
    args = [dense.spd(rng, 4, stack) for _ in range(arguments)]
    mapped = sequential_on_cpu(function)
    assert_each(jax.jit(mapped)(*args), function, stack, *args)
    if len(stack) == 1:
        assert_each(mapped(*args), function, stack, *args)
        assert_each(jax.jit(jax.vmap(mapped))(*args), function, stack, *args)
    if len(stack) == 2:
        assert_each(jax.jit(jax.vmap(mapped))(*args), function, stack, *args)


@pytest.mark.parametrize("axes", [(0, None), (None, 0)], ids=["first", "second"])
def test_a_vmap_over_one_of_two_arguments_repeats_the_other(axes, rng, x64):
    args = [dense.spd(rng, 4, () if axis is None else (3,)) for axis in axes]
    got = jax.jit(jax.vmap(sequential_on_cpu(whitened), in_axes=axes))(*args)
    assert_each(got, whitened, (3,), *(np.broadcast_to(x, (3, 4, 4)) for x in args))


def test_a_vmap_over_another_axis_is_the_plain_one(rng, x64):
    m = dense.spd(rng, 4, (3,))
    got = jax.vmap(sequential_on_cpu(cholesky), in_axes=1)(np.moveaxis(m, 0, 1))
    assert_each(got, cholesky, (3,), m)


def lapack_operands(function, *args):
    """The number of axes of every array that the lowered program hands to LAPACK."""
    text = jax.jit(function).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "custom_call @lapack_" in line]
    types = [re.findall(r"tensor<([\dx]*)f32>", line.rsplit(" : ", 1)[-1]) for line in lines]
    return [shape.count("x") for line in types for shape in line]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="lowers for the CPU")
@pytest.mark.parametrize("stack", [(3,), (2, 3)], ids=str)
@each_function
def test_on_a_cpu_lapack_gets_one_matrix_at_a_time(function, arguments, stack):
    args = [jax.ShapeDtypeStruct((*stack, 4, 4), jnp.float32)] * arguments
    batched = function
    for _ in stack:
        batched = jax.vmap(batched)
    assert max(lapack_operands(batched, *args)) > 2  # as it would be
    mapped = sequential_on_cpu(function)
    for program in (mapped, jax.vmap(mapped)):
        assert max(lapack_operands(program, *args)) == 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@each_function
def test_elsewhere_a_stack_is_one_batched_call(function, arguments, platform):
    args = [jax.ShapeDtypeStruct((2, 3, 4, 4), jnp.float32)] * arguments
    exported = jax.export.export(jax.jit(sequential_on_cpu(function)), platforms=(platform,))(*args)
    program = exported.mlir_module()
    assert "stablehlo.while" not in program
    batched = [line for line in program.splitlines() if "custom_call" in line or "cholesky" in line]
    assert any("tensor<2x3x4x4xf32>" in line for line in batched)


ROUNDS = """
import jax, jax.numpy as jnp
from kldwrm_jax.curvature.sides import Matrix

shapes = [(2, 512, 512), (2, 513, 513), (785, 785)]
stacks = [jnp.broadcast_to(2.0 * jnp.eye(shape[-1]), shape) for shape in shapes]
invert = jax.jit(lambda stacks: [Matrix.inverse(m) for m in stacks])
for _ in range(10):
    inverses = jax.block_until_ready(invert(stacks))
print([round(float(m.max()), 5) for m in inverses])
"""


def test_several_stacks_in_one_program_do_not_wait_for_each_other():
    """Batched calls of LAPACK do, for ever, where there are few threads."""
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[0.5, 0.5, 0.5]"
