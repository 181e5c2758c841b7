"""Many blocks at once: the same results as one by one, in few calls."""

import operator
import re

import dense
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.curvature import Dense, Diagonal, Kronecker, decompose
from kldwrm_jax.curvature.sides import Subspace

OPERATIONS = {"inverse": 1, "eigen": 1, "pencil": 2}  # and how many factors they take
MIXED = [  # block, stack, inputs, outputs
    (Kronecker(), (), 3, 2),
    (Diagonal(), (), 3, 2),
    (Kronecker(), (), 2, 3),
    (Kronecker(a_diagonal=True), (), 3, 3),
    (Dense(), (), 3, 1),
    (Kronecker(), (2,), 3, 2),
    (Kronecker(g_diagonal=True), (2,), 3, 2),
    (Kronecker(), (2,), 3, 3),
    (Diagonal(), (), 3, 2),
]


def mixed(rng):
    blocks = [block for block, *_ in MIXED]
    return blocks, [dense.random_factors(*own[:1], rng, *own[1:]) for own in MIXED]


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), got, expected
    )


def alone(operation, blocks, *factors):
    """One block at a time, in one program."""
    return jax.jit(
        lambda *factors: [
            decompose(operator.attrgetter(operation), [block], *([f] for f in own))[0]
            for block, *own in zip(blocks, *factors, strict=True)
        ]
    )(*factors)


def together(operation, blocks, *factors):
    pick = operator.attrgetter(operation)
    return jax.jit(lambda *factors: decompose(pick, blocks, *factors))(*factors)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_blocks_of_all_kinds_together_are_what_each_is_alone(operation, rng, x64):
    blocks, _ = mixed(rng)
    factors = [mixed(rng)[1] for _ in range(OPERATIONS[operation])]
    got = together(operation, blocks, *factors)
    assert_equal(got, alone(operation, blocks, *factors))
    if operation == "pencil":
        assert_equal(together("outer", blocks, got), alone("outer", blocks, got))


def test_sides_are_compressed_where_there_is_a_subspace_to_start_with(rng, x64):
    blocks = [Kronecker(), Diagonal(), Kronecker(), Kronecker(g_diagonal=True)]
    sizes = [(5, 3), (5, 5), (3, 5), (5, 5)]
    factors = [dense.random_factors(b, rng, (), *own) for b, own in zip(blocks, sizes, strict=True)]
    wide = [Subspace(rng.normal(size=(5, 2)), rng.normal(size=(5, 1))) for _ in range(3)]
    starts = [(wide[0], None), None, (None, wide[1]), (wide[2], None)]
    got = together("compress", blocks, factors, starts)
    assert_equal(got, alone("compress", blocks, factors, starts))
    np.testing.assert_array_equal(got[0][1], factors[0][1])
    np.testing.assert_array_equal(got[1], factors[1])
    assert [side.vectors.shape for side in (got[0][0], got[2][1], got[3][0])] == [(5, 2)] * 3


SIZES = [(5, 5), (5, 4), (4, 5), (5, 1), (6, 4)]  # five sides of 5, three of 4, a diagonal one
FACTORISATION = r"custom_call @\w*(?:potrf|syevd)\w*\(.*: \(tensor<([\dx]+)xf32>"


def factored(operation, platform, rng):
    """Shapes of the operands of every factorisation in a platform's program."""
    blocks = [Kronecker()] * 3 + [Dense(), Kronecker(a_diagonal=True)]
    factors = [
        jax.tree.map(jnp.float32, dense.random_factors(b, rng, (), *own))
        for b, own in zip(blocks, SIZES, strict=True)
    ]
    program = jax.jit(lambda *f: decompose(operator.attrgetter(operation), blocks, *f))
    arguments = [factors] * OPERATIONS[operation]
    text = jax.export.export(program, platforms=(platform,))(*arguments).mlir_module()
    return sorted(re.findall(FACTORISATION, text))


EACH = [("inverse", 1), ("eigen", 1), ("pencil", 2)]  # and how many factorisations a matrix takes


@pytest.mark.parametrize(("operation", "each"), EACH)
def test_on_an_accelerator_sides_of_equal_shape_are_decomposed_in_one_call(operation, each, rng):
    assert factored(operation, "cuda", rng) == sorted(["5x5x5", "3x4x4"] * each)


@pytest.mark.parametrize(("operation", "each"), EACH)
def test_on_a_cpu_each_is_decomposed_by_itself(operation, each, rng):
    assert factored(operation, "cpu", rng) == sorted((["5x5"] * 5 + ["4x4"] * 3) * each)
