"""Many blocks at once: the same results as one by one, in few calls."""

import collections

import dense
import jax
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
            decompose(operation, [block], *([f] for f in own))[0]
            for block, *own in zip(blocks, *factors, strict=True)
        ]
    )(*factors)


def together(operation, blocks, *factors):
    return jax.jit(lambda *factors: decompose(operation, blocks, *factors))(*factors)


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


def calls(jaxpr):
    """How often each primitive runs, of the branches for different platforms the most."""
    counted = collections.Counter()
    for equation in jaxpr.eqns:
        counted[equation.primitive.name] += 1
        branches = [calls(b.jaxpr) for b in equation.params.get("branches", ())]
        for name in set().union(*branches):
            counted[name] += max(branch[name] for branch in branches)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value if hasattr(value, "eqns") else None)
            if inner is not None:
                counted += calls(inner)
    return counted


@pytest.mark.parametrize(
    ("operation", "primitives"),
    [("inverse", {"cholesky"}), ("eigen", {"eigh"}), ("pencil", {"cholesky", "eigh"})],
)
def test_sides_of_equal_shape_are_decomposed_in_one_call(operation, primitives, rng):
    blocks = [Kronecker()] * 3 + [Dense(), Kronecker(a_diagonal=True)]
    sizes = [(5, 5), (5, 4), (4, 5), (5, 1), (6, 4)]  # six sides of 5, three of 4
    factors = [
        jax.tree.map(jnp.float32, dense.random_factors(b, rng, (), *own))
        for b, own in zip(blocks, sizes, strict=True)
    ]
    program = jax.make_jaxpr(lambda *f: decompose(operation, blocks, *f))
    counted = calls(program(*[factors] * OPERATIONS[operation]).jaxpr)
    assert {name: counted[name] for name in ("cholesky", "eigh")} == {
        name: 2 * (name in primitives) for name in ("cholesky", "eigh")
    }
