"""What a step costs, counted by the compiler: nothing here depends on the clock."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_nets import WELL

from kldwrm_jax import Fit
from kldwrm_jax.experiments.bench_cases import training_step
from kldwrm_jax.experiments.bench_networks import images as batch_of
from kldwrm_jax.experiments.models import MLP

BATCH = 512
SHAPES = ((784, 512), (512, 512), (512, 10))
PARAMETERS = 4 * sum((n + 1) * m for n, m in SHAPES)  # bytes
INVERSES = 4 * sum((n + 1) ** 2 + m**2 for n, m in SHAPES)  # bytes


def products(rows):
    """Operations of multiplying matrices of so many rows by every layer's kernel."""
    return sum(2 * rows * n * m for n, m in SHAPES)


FORWARD = products(BATCH)
BACKWARD = 2 * FORWARD - 2 * BATCH * 784 * 512  # no gradient of the images
ONE_SIDED_PAIR = sum(2 * ((n + 1) ** 2 * m + (n + 1) * m**2) for n, m in SHAPES)
SECOND_MOMENTS = sum(2 * BATCH * ((n + 1) ** 2 + m**2) for n, m in SHAPES)
OUTPUT_GRADIENTS = BACKWARD - FORWARD
# The compiler counts the costlier branch, which measures a part of the batch: the outputs, and for
# the tangents along every direction two products a layer (the images have none). A step that sets
# itself has three directions, and the outputs before the last step; one with a rate that is near
# its limit has one.
MEASURED = Fit().examples_of((BATCH,))
OUTPUTS = products(MEASURED)
TANGENTS = 2 * OUTPUTS - 2 * MEASURED * 784 * 512
MEASURING = {"kfac-nothing-set": 3 * TANGENTS + 2 * OUTPUTS}
MEASURING_ITS_SIZE = TANGENTS + OUTPUTS


def measuring(subject):
    return MEASURING.get(subject, MEASURING_ITS_SIZE)


@functools.cache
def compiled(subject, count=None):
    """An optimized step of ``subject``: the ``count``-th, or any."""
    batch = batch_of(BATCH)
    step, state = training_step(MLP(10, (512, 512)), subject, batch, "value_and_grad", "empirical")

    def this_step(state, batch):
        params, opt_state = state
        if subject != "sgd" and count is not None:
            monitor = opt_state.monitor._replace(refreshes=jnp.asarray(min(count, 1), jnp.int32))
            opt_state = opt_state._replace(count=jnp.asarray(count, jnp.int32), monitor=monitor)
        return step((params, opt_state), batch)

    lowered = jax.jit(this_step, donate_argnums=0).lower(state, batch)
    return lowered.compile(compiler_options=WELL)


def cost(subject, count):
    """Operations and bytes of a step."""
    found = compiled(subject, count).cost_analysis()
    found = found[0] if isinstance(found, list) else found
    return found["flops"], found["bytes accessed"]


BETWEEN = {"kfac-nothing-set": 1, "kfac": 1, "so": 1, "q": 1, "kfac-product": 2}  # pairs a layer


def subjects(names, slow):
    """The parameters of a test; Q does all that SO does."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.mark.parametrize("subject", subjects(BETWEEN, slow={"so"}))
def test_a_step_without_a_refresh_computes_little_more_than_its_products(subject):
    flops, _ = cost(subject, count=1)
    products = FORWARD + BACKWARD + BETWEEN[subject] * ONE_SIDED_PAIR + measuring(subject)
    assert products <= flops <= 1.01 * products


# How often the step reads or writes an array as large as the parameters, beyond SGD: for K-FAC the
# gradient is joined (2), multiplied from both sides (4), and compared with the result (2); members
# with a wake add the effective gradient (3), what they remember (13 or so), norms for diagnostics
# and clipping. The JVP's activations and tangents, and the shortened step, are as much as 15 more.
# A step that sets itself was measured: 71 in all, of which its 15 products of two trees are 30.
PASSES = {"kfac-nothing-set": 58, "kfac": 8, "so": 22, "q": 30, "kfac-product": 15}


@pytest.mark.parametrize("subject", subjects(PASSES, slow={"so"}))
def test_a_step_without_a_refresh_moves_few_bytes(subject):
    _, plain = cost("sgd", count=1)
    _, moved = cost(subject, count=1)
    passes = PASSES[subject] + 15
    assert moved <= 1.05 * (plain + BETWEEN[subject] * INVERSES + passes * PARAMETERS)


@pytest.mark.parametrize("subject", ["kfac-nothing-set", "kfac"])
def test_a_refresh_repeats_no_forward_pass(subject):
    flops, _ = cost(subject, count=0)
    inverses = sum(2 * ((n + 1) ** 3 + m**3) for n, m in SHAPES)  # the product of two triangles
    limit = FORWARD + BACKWARD + ONE_SIDED_PAIR + SECOND_MOMENTS + OUTPUT_GRADIENTS + inverses
    assert flops - measuring(subject) <= 1.02 * limit


def test_statistics_of_the_datas_labels_every_step_cost_their_products_and_no_other_pass():
    flops, _ = cost("kfac-every-step", count=1)
    limit = FORWARD + BACKWARD + ONE_SIDED_PAIR + SECOND_MOMENTS
    assert flops - MEASURING_ITS_SIZE <= 1.02 * limit


def decompositions(subject):
    """Names of decompositions outside of branches, and the calls of LAPACK in the program."""
    batch = batch_of(4)
    step, state = training_step(MLP(10, (24, 24)), subject, batch)
    outside = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":
                continue
            if equation.primitive.name in ("cholesky", "eigh", "qr", "svd", "lu"):
                outside.append(equation.primitive.name)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value if hasattr(value, "eqns") else None)
                if inner is not None:
                    walk(inner)

    walk(jax.make_jaxpr(step)(state, batch).jaxpr)
    program = jax.jit(step).lower(state, batch).as_text()
    calls = re.findall(r"custom_call @lapack_s(potrf|syevd)", program)
    return outside, {name: calls.count(name) for name in {*calls}}


SIDES = 6  # of 785, 24, 25, 24, 25 and 10


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts calls of LAPACK")
@pytest.mark.parametrize(
    ("subject", "per_period"),
    [
        ("kfac-nothing-set", {"potrf": SIDES}),
        ("kfac", {"potrf": SIDES}),
        ("so", {"potrf": SIDES}),
        ("kfac-product", {"syevd": SIDES}),
        ("q", {"potrf": SIDES, "syevd": SIDES}),
        ("q-reweighted", {"syevd": 2 * SIDES}),  # averages and reweighted averages
    ],
)
def test_every_side_is_decomposed_once_a_period_and_never_between(subject, per_period):
    outside, calls = decompositions(subject)
    assert outside == []
    assert calls == per_period


# What a step needs at once is reserved for every call, with a refresh or without; on Linux, memory
# beyond 32 MiB comes fresh from the kernel each time, page by page.
@pytest.mark.parametrize(
    "subject",
    subjects(
        ["kfac-nothing-set", "kfac", "so", "kfac-product", "kfac-every-step"],
        slow={"so", "kfac-product"},
    ),
)
def test_a_step_needs_no_more_memory_at_once_than_is_handed_out_again(subject):
    assert compiled(subject).memory_analysis().temp_size_in_bytes < 32 * 2**20


def test_states_are_no_larger_than_factors_inverses_and_what_the_wake_remembers():
    batch = batch_of(4)

    def state_bytes(subject):
        _, (_, opt_state) = training_step(MLP(10, (512, 512)), subject, batch)
        return sum(np.asarray(x).nbytes for x in jax.tree.leaves(opt_state))

    scalars = 200  # bytes: of the monitor, and of every factor its decay
    of_the_fit = 200  # bytes: of what is known of the steps so far
    assert state_bytes("kfac-nothing-set") <= 2 * (INVERSES + PARAMETERS) + scalars + of_the_fit
    assert state_bytes("kfac") <= 2 * INVERSES + scalars
    assert state_bytes("kfac-product") <= 2 * INVERSES + 4 * 8 * 1024 + scalars
    assert state_bytes("so") <= 2 * INVERSES + 3 * PARAMETERS + scalars
    assert state_bytes("q") <= 2 * INVERSES + 3 * PARAMETERS + scalars
    assert state_bytes("qe") <= 2 * INVERSES + (3 + 4) * PARAMETERS + scalars
