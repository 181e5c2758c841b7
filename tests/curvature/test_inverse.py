"""When inverses are made, and how: in turns, all at once, of a low rank."""

import functools
import time

import dense
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import precision
import pytest
import small_nets
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kldwrm_jax as kw
from kldwrm_jax.curvature import (
    Diagonal,
    FactoredDamping,
    Kronecker,
    LayerBlock,
    Parameter,
    ProductDamping,
)
from kldwrm_jax.curvature.inverse import slots
from kldwrm_jax.curvature.sides import LowRank
from kldwrm_jax.paths import leaves_by_path

GAMMA, LR = 0.05, 0.3
DAMPING = {"product": ProductDamping(), "factored": FactoredDamping()}
each_mode = pytest.mark.parametrize("mode", DAMPING)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with precision.x64(True):
        yield


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "svd"}, "method must be one of 'auto', 'full', 'randomized', got 'svd'"),
        ({"method": "randomized"}, "method='randomized' needs a rank, such as rank=128, got None"),
        ({"method": "randomized", "rank": 0}, "rank must be a whole number >= 1.*got 0"),
        ({"method": "randomized", "rank": 2.5}, "rank must be a whole number >= 1.*got 2.5"),
        ({"rank": 8}, "rank=8 needs method='randomized', got 'auto'"),
        ({"every": 0}, "every must be a whole number >= 1.*got 0"),
        ({"every": 2.5}, "every must be a whole number >= 1.*got 2.5"),
        ({"stagger": "yes"}, "stagger must be True or False, got 'yes'"),
        ({"mesh": "data"}, "mesh must be a jax.sharding.Mesh, got 'data'"),
    ],
)
def test_bad_arguments_are_named_with_their_value_and_a_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        kw.Inverse(**arguments)


@pytest.mark.parametrize(
    ("refresh_every", "every", "message"),
    [
        (1, None, "at least two steps.*refresh_every=1, every=None"),
        (1, 1, "at least two steps.*refresh_every=1, every=1"),
        (jnp.asarray(4), None, "refresh_every=4, every=None.*among its static_args"),
    ],
    ids=["every step", "every step, said twice", "array"],
)
def test_turns_need_a_period_of_two_that_is_known(refresh_every, every, message):
    layers = small_nets.problem().layers
    inverse = kw.Inverse(every=every, stagger=True)
    with pytest.raises(ValueError, match=rf"Inverse\(stagger=True\).*{message}"):
        kw.kfac(layers, 0.1, refresh_every=refresh_every, inverse=inverse)


# --- Whose turn it is -----------------------------------------------------------------------------


def layer(name, inputs, outputs, stack=(), block=None):
    block = block or Kronecker()
    if isinstance(block, Diagonal):
        shapes = ((*stack, inputs, outputs),)
    else:
        a = (inputs,) if block.a_diagonal else (inputs, inputs)
        g = (outputs,) if block.g_diagonal else (outputs, outputs)
        shapes = (stack + a, stack + g)
    return LayerBlock(name, "Dense", block, (Parameter(name, (*stack, inputs, outputs)),), shapes)


def plan(blocks, period):
    """``{name: [(step, copies)]}``; of a block that is not stacked, its only copy is 0."""
    planned = {block.name: [] for block in blocks}
    for slot in slots(blocks, period):
        for block in slot.blocks:
            for i, step in enumerate(slot.steps):
                if slot.copies is None:
                    copies = [0]
                else:  # a slice, which does not reach over the end
                    last = block.shapes[0][0] - slot.copies
                    copies = [min(i * slot.copies, last) + j for j in range(slot.copies)]
                planned[block.name].append((step, copies))
    return planned


def copies_of(block):
    if isinstance(block.block, Diagonal):
        return 1
    own = 1 if block.block.a_diagonal else 2
    return block.shapes[0][0] if len(block.shapes[0]) > own else 1


def cubes(block):
    """The work of one copy, up to a constant."""
    if isinstance(block.block, Diagonal):
        return 0
    sizes = [np.prod(shape) / copies_of(block) for shape in block.shapes]
    diagonal = block.block.a_diagonal, block.block.g_diagonal
    widths = [1 if d else shape[-1] for d, shape in zip(diagonal, block.shapes, strict=True)]
    return sum(size * width for size, width in zip(sizes, widths, strict=True))


PLAIN = [layer(f"plain {i}", 3 + i, 2 + i % 4) for i in range(12)]
DIAGONAL = [layer(f"diagonal {i}", 50, 50, block=Diagonal()) for i in range(3)]
EMBEDDING = layer("embedding", 1000, 4, block=Kronecker(a_diagonal=True))
STACKED = [layer("stacked", 6, 5, (7,)), layer("twice", 4, 4, (5, 2))]
OTHERS = [
    layer("stacked norm", 8, 8, (3,), Diagonal()),
    layer("stacked embedding", 9, 4, (2,), Kronecker(a_diagonal=True)),
]
LISTS = {
    "plain": PLAIN,
    "one": PLAIN[:1],
    "diagonal": DIAGONAL,
    "stacked": STACKED,
    "all": PLAIN + DIAGONAL + [EMBEDDING] + STACKED + OTHERS,
}


@pytest.mark.parametrize("period", [2, 3, 4, 5, 30])
@pytest.mark.parametrize("blocks", LISTS.values(), ids=LISTS)
def test_every_copy_of_every_block_has_its_turn_after_the_first_step(blocks, period):
    """Once, but for the last slice of a stack that the steps do not divide."""
    for block in blocks:
        slots = plan(blocks, period)[block.name]
        assert all(1 <= step < period for step, _ in slots)
        assert len({step for step, _ in slots}) == len(slots)
        taken = [copy for _, copies in slots for copy in copies]
        assert set(taken) == set(range(copies_of(block)))
        assert len(taken) - copies_of(block) < len(slots[0][1])


def loads(blocks, period):
    work = np.zeros(period - 1)
    for block in blocks:
        for step, copies in plan(blocks, period)[block.name]:
            work[step - 1] += len(copies) * cubes(block)
    return work


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    period=st.integers(2, 9),
)
@example(sizes=[(10, 10)] * 8, period=5)
def test_no_step_has_more_than_the_mean_and_one_block_more(sizes, period):
    blocks = [layer(str(i), *own) for i, own in enumerate(sizes)]
    work = loads(blocks, period)
    assert work.sum() == sum(a**3 + g**3 for a, g in sizes)
    assert work.max() <= work.mean() + max(cubes(block) for block in blocks)


@pytest.mark.parametrize("period", [3, 5, 8])
def test_copies_of_long_stacks_are_spread_evenly_and_others_fill_the_gaps(period):
    """Each step has at most one slice of copies or one block more than another."""
    stacked = layer("stacked", 20, 20, (14,))
    blocks = [stacked, *PLAIN]
    largest = -(-14 // (period - 1)) * cubes(stacked)
    work = loads(blocks, period)
    assert work.max() - work.min() <= largest


def test_stacks_shorter_than_the_period_do_not_all_begin_at_once():
    """As the layers of a transformer's scanned blocks do in a period of 30."""
    blocks = [layer(f"stacked {i}", 20, 20, (6,)) for i in range(4)]
    work = loads(blocks, 13)
    assert work.max() <= work.mean() + cubes(blocks[0])


# --- Training in turns ----------------------------------------------------------------------------


class Repeated(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(3, name="dense", param_dtype=float)(x)), None


class Deep(nn.Module):
    """A scanned layer of three copies among others of all kinds."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(3, name="first", param_dtype=float)(x))
        scanned = nn.scan(
            Repeated, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = scanned(name="scanned")(x, None)
        x = nn.LayerNorm(name="norm", param_dtype=float)(x)
        return nn.Dense(small_nets.OUTPUTS, name="last", param_dtype=float)(x)


@functools.cache
def deep():
    like = small_nets.problem(dtype=jnp.float64)
    params = Deep().init(jax.random.key(0), like.x[0])["params"]
    net = kw.instrument(Deep(), kw.Categorical(), like.x[0], fisher="empirical")
    return small_nets.Problem(Deep(), net, params, like.x, like.y)


# The maker, its arguments, how it damps.
COMMON = {"learning_rate": LR, "damping": GAMMA, "kl_clip": None, "refresh_every": 4}
OF_Q = COMMON | {"block_clip": None}
MEMBERS = {
    "kfac": (kw.kfac, COMMON, "product"),
    "kfac, factored": (kw.kfac, COMMON | {"damping_mode": "factored"}, "factored"),
    "kfac, inverted every third refresh": (kw.kfac, COMMON | {"refresh_every": 1}, "product"),
    "so": (kw.so_kldwrm, COMMON, "product"),
    "q": (kw.q_kldwrm, OF_Q, "factored"),
    "q, reweighted": (kw.q_kldwrm, OF_Q | {"solver": "reweighted"}, "product"),
    "qe": (
        kw.qe_kldwrm,
        OF_Q | {"capacity": 2, "inner_steps": 1, "kl_scale": 0.5},
        "factored",
    ),
}
EVERY = {"kfac, inverted every third refresh": 3}
STEPS = 9
each_member = pytest.mark.parametrize("name", MEMBERS)


def member(name, **inverse):
    make, arguments, _ = MEMBERS[name]
    return make(deep().layers, **arguments, inverse=kw.Inverse(every=EVERY.get(name), **inverse))


def period_of(name):
    return EVERY.get(name, 4)


class Run:
    def __init__(self, name, steps=STEPS, **inverse):
        tx = member(name, **inverse)
        self.step = small_nets.jit(deep().step(tx))
        self.trace = [(deep().params, tx.init(deep().params))]
        for k in range(steps):
            self.trace.append(self.step(*self.trace[-1], k))

    def after(self, k):
        """The state after step ``k``."""
        return self.trace[k + 1][1]


@functools.cache
def staggered(name):
    return Run(name, stagger=True)


def stack_of(block):
    return block.shapes[0][:-2] if isinstance(block.block, Kronecker) else ()


def direction(block):
    shape = block.gather(leaves_by_path(deep().params)).shape
    return np.random.default_rng(1).normal(size=shape)


def solved(block, cache, mode):
    """What an inverse makes of some direction."""
    return np.asarray(DAMPING[mode].solve(block.block, cache, direction(block), GAMMA, 1.0))


def densely(block, f, mode):
    """The same, from the factors."""
    f = jax.tree.map(np.asarray, f)
    if isinstance(block.block, Diagonal):
        return direction(block) / (f + GAMMA)
    damped = dense.damped(block.block, f, GAMMA, mode, stack_of(block))
    return dense.solve(damped, direction(block))


def assert_close(got, expected, rtol=1e-8):
    np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * np.abs(expected).max())


def differing(old, new, copies):
    """The copies of which something has changed."""
    pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    if copies == 1:
        return {0} if any((a != b).any() for a, b in pairs) else set()
    return {i for i in range(copies) if any((a[i] != b[i]).any() for a, b in pairs)}


@each_member
def test_after_the_first_refresh_all_inverses_are_there_as_without_turns(name):
    *_, mode = MEMBERS[name]
    plain = Run(name, steps=1)
    for block in deep().layers:
        got = solved(block, staggered(name).after(0).inverses[block.name], mode)
        assert_close(got, solved(block, plain.after(0).inverses[block.name], mode))
        assert_close(got, densely(block, plain.after(0).factors[block.name], mode))


@each_member
def test_each_is_inverted_anew_in_its_turn_and_not_before(name):
    *_, mode = MEMBERS[name]
    run, period = staggered(name), period_of(name)
    schedule = plan(list(deep().layers), period)
    changes = 0
    for k in range(1, STEPS):
        before, after = run.after(k - 1), run.after(k)
        for block in deep().layers:
            copies = copies_of(block)
            turn = {c for step, own in schedule[block.name] if step == k % period for c in own}
            changed = differing(before.inverses[block.name], after.inverses[block.name], copies)
            assert changed <= turn, (k, block.name)
            got = solved(block, after.inverses[block.name], mode)
            expected = densely(block, after.factors[block.name], mode)
            for c in turn:
                pick = slice(None) if copies == 1 else c
                assert_close(got[pick], expected[pick])
            if k > period:
                assert changed == turn, (k, block.name)  # there were new statistics
                changes += len(turn)
    assert changes > 0


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in EVERY])
def test_at_the_end_of_a_period_all_inverses_are_those_of_the_present_factors(name):
    *_, mode = MEMBERS[name]
    state, before = staggered(name).after(7), staggered(name).after(3)
    for block in deep().layers:
        expected = densely(block, state.factors[block.name], mode)
        got, old = (solved(block, x.inverses[block.name], mode) for x in (state, before))
        assert_close(got, expected)
        assert np.abs(got - old).max() > 1e-4 * np.abs(old).max()


@each_member
def test_diagnostics_of_training_in_turns(name):
    run = staggered(name)
    scalars = kw.diagnostics(run.after(STEPS - 1))
    assert scalars["steps"] == STEPS
    assert scalars["refreshes"] == (STEPS if name in EVERY else 3)
    assert scalars["rejected_refreshes"] == scalars["rejected_steps"] == 0
    rho = {"q": 0.5, "qe": 0.5}.get(name.split(",")[0])
    if rho:  # as between refreshes, on every step
        np.testing.assert_allclose(scalars["contraction"], rho * LR / (1 + LR), rtol=1e-6)
    else:
        assert scalars["contraction"] == 0
    first, last = (deep().oracle(p, 0).loss(p) for p, _ in (run.trace[0], run.trace[-1]))
    assert last < first


@pytest.mark.parametrize(
    ("block", "copy"), [("first", 0), ("scanned/dense", 0), ("scanned/dense", 2)]
)
@pytest.mark.parametrize("name", ["kfac", "kfac, factored", "so", "q"])
def test_factors_that_are_not_finite_leave_the_inverse_as_it_was(name, block, copy):
    run = staggered(name)
    copies = copies_of(deep().layers[block])
    ((turn, _),) = [slot for slot in plan(list(deep().layers), 4)[block] if copy in slot[1]]
    params, before = run.trace[5]  # after the second refresh
    a, g = before.factors[block]
    place = (copy, 0, 0) if copies > 1 else (0, 0)
    state = before._replace(factors=before.factors | {block: (a.at[place].set(np.nan), g)})
    for k in range(5, 8):
        params, state = run.step(params, state, k)
        rejected = kw.diagnostics(state)["rejected_refreshes"]
        assert rejected == int(k - 4 >= turn)
    changed = differing(before.inverses[block], state.inverses[block], copies)
    assert changed == set(range(copies)) - {copy}
    assert kw.diagnostics(state)["rejected_steps"] == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state.inverses)))


@pytest.mark.parametrize("inverse", [{"stagger": True}, {"method": "randomized", "rank": 99}])
@pytest.mark.parametrize("name", ["q", "q, reweighted"])
def test_q_takes_the_average_for_the_models_curvature_at_refreshes_too(name, inverse):
    """Up to step 4, the second refresh included, inverses in turn are those of the first."""
    *_, mode = MEMBERS[name]
    run = staggered(name) if "stagger" in inverse else Run(name, 5, **inverse)
    for k in (0, 1, 4):
        (old, _), (new, state) = run.trace[k], run.trace[k + 1]
        moved, h = (
            leaves_by_path(tree)
            for tree in (
                jax.tree.map(lambda a, b: a - b, old, new),
                jax.tree.map(lambda g: LR * g, state.g_hat),
            )
        )
        inverted = run.after(0 if "stagger" in inverse else k).factors
        for block in deep().layers:
            f = jax.tree.map(np.asarray, inverted[block.name])
            right = np.asarray(block.gather(h))
            if name == "q":  # (F_bar + gamma)^-1 h / (1 + lr)
                scale, c = 1 + LR, 1.0
            else:  # every factor times 1 + lr, and gamma
                scale, c = 1.0, 1 + LR
            f = jax.tree.map(lambda x: c * x, f)
            if isinstance(block.block, Diagonal):
                expected = right / (f + GAMMA) / scale
            else:
                damped = dense.damped(block.block, f, GAMMA, mode, stack_of(block))
                expected = dense.solve(damped, right) / scale
            assert_close(block.gather(moved), expected, 1e-7)


def test_a_first_inversion_that_fails_is_no_refresh():
    """As without turns: no step is taken with an inverse that is not there."""
    problem = small_nets.problem(norm=False)
    zeros = small_nets.Problem(
        problem.model, problem.net, problem.params, np.zeros_like(problem.x), problem.y
    )
    tx = kw.q_kldwrm(
        problem.layers, 0.1, damping=0.0, refresh_every=4, inverse=kw.Inverse(stagger=True)
    )
    params, state = small_nets.jit(zeros.step(tx))(problem.params, tx.init(problem.params), 0)
    jax.tree.map(np.testing.assert_array_equal, params, problem.params)
    assert kw.diagnostics(state)["rejected_refreshes"] == 1
    assert kw.diagnostics(state)["steps"] == 0


# --- Randomized -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stagger", [False, True], ids=["at once", "in turns"])
@pytest.mark.parametrize("name", ["kfac", "kfac, factored", "so"])
def test_a_rank_that_no_side_exceeds_is_the_full_method(name, stagger):
    full = staggered(name) if stagger else Run(name, 5)
    got = Run(name, 5, stagger=stagger, method="randomized", rank=5)
    for (params, state), (wanted, expected) in zip(got.trace, full.trace[:6], strict=True):
        jax.tree.map(functools.partial(assert_close, rtol=1e-9), params, wanted)
        assert jax.tree.structure(state) == jax.tree.structure(expected)


WIDE, RANK = 20, 6


class Wide(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        return nn.Dense(small_nets.OUTPUTS, name="wide", param_dtype=float)(x)


@functools.cache
def wide(decay):
    """One layer whose inputs have the singular values ``decay ** i``."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(64, WIDE)))
    v, _ = np.linalg.qr(rng.normal(size=(WIDE, WIDE)))
    x = 8 * (u * decay ** np.arange(WIDE)) @ v.T
    y = (x @ rng.normal(size=(WIDE, small_nets.OUTPUTS))).argmax(axis=-1)
    params = Wide().init(jax.random.key(0), x)["params"]
    net = kw.instrument(Wide(), kw.Categorical(), x, fisher="empirical")
    return small_nets.Problem(Wide(), net, params, x[None], y[None])


def run_wide(decay, steps, mode="product", rank=None, lr=LR):
    problem = wide(decay)
    inverse = kw.Inverse(method="randomized", rank=rank) if rank else kw.Inverse()
    tx = kw.kfac(
        problem.layers,
        lr,
        damping=GAMMA,
        damping_mode=mode,
        kl_clip=None,
        refresh_every=1,
        inverse=inverse,
    )
    step = small_nets.jit(problem.step(tx))
    trace = [(problem.params, tx.init(problem.params))]
    for k in range(steps):
        trace.append(step(*trace[-1], k))
    return trace


@each_mode
def test_the_direction_is_as_near_as_what_is_discarded_allows(mode):
    r"""Discarded eigenvalues, all in ``[0, mu]``, become their mean, so ``|A~ - A| <= mu``.

    With product damping ``v~ - v = (A~ x G + gamma)^-1 ((A - A~) x G) v``, at most ``mu |G| /
    gamma`` times ``v`` in norm. With factored damping, whose shift ``c`` of ``A`` is the same for
    both, as the trace is kept, ``v~ - v = (A~ + c)^-1 (A - A~) v``, at most ``mu / c`` times ``v``.
    """
    (start, _), (full, state) = run_wide(0.35, 1, mode)
    _, (low, _) = run_wide(0.35, 1, mode, RANK)
    a, g = map(np.asarray, state.factors["wide"])
    values = np.linalg.eigvalsh(a)
    mu = values[-RANK - 1]
    if mode == "product":
        bound = mu * np.linalg.norm(g, 2) / GAMMA
    else:
        pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
        bound = mu / (pi * np.sqrt(GAMMA))
    (block,) = wide(0.35).layers

    def step(params):
        moved = jax.tree.map(lambda p, q: p - q, params, start)
        return np.asarray(block.gather(leaves_by_path(moved)))

    v, changed = step(full), np.linalg.norm(step(low) - step(full))
    assert 0 < changed <= 1.1 * bound * np.linalg.norm(v)  # the vectors are found to a tenth
    assert bound < 0.1


@each_mode
def test_a_low_rank_takes_less_room(mode):
    def entries(rank):
        state = run_wide(0.35, 0, mode, rank)[0][1]
        return sum(x.size for x in jax.tree.leaves(state.inverses))

    n, m = WIDE + 1, small_nets.OUTPUTS
    values = {"product": 1, "factored": 0}[mode]  # eigenvalues beside the vectors
    assert entries(None) == n * n + m * m + values * (n + m)
    assert entries(RANK) == n * RANK + RANK + 1 + m * m + values * m


@each_mode
def test_a_refresh_starts_from_the_vectors_of_the_one_before(mode):
    """On the same statistics again and again, they go on converging."""
    trace = run_wide(0.9, 12, mode, RANK, lr=0.0)
    a = np.asarray(trace[1][1].factors["wide"][0])
    best = np.linalg.eigh(a)[1][:, -RANK:]

    def error(k):
        u = np.asarray(trace[k][1].inverses["wide"][0].vectors)
        return np.linalg.norm(best - u @ (u.T @ best), ord=2)

    errors = [error(k) for k in (1, 4, 12)]
    assert errors[0] > 0.01  # the first has not found them all
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.1 * errors[0]


def test_copies_of_low_rank_have_their_turns_too():
    """The traces say which average an inverse is of."""
    run = Run("kfac", 8, stagger=True, method="randomized", rank=3)
    schedule = dict(plan(list(deep().layers), 4)["scanned/dense"])

    def traces(k):
        a, basis = run.after(k).factors["scanned/dense"][0], run.after(k).inverses["scanned/dense"]
        kept = basis[0].values.sum(axis=-1) + basis[0].tail
        return np.trace(a, axis1=-2, axis2=-1), np.asarray(kept)

    first, present = traces(0)[0], traces(4)[0]
    assert (np.abs(first - present) > 1e-3 * first).all()
    done = set()
    for k in range(4, 8):
        done |= set(schedule.get(k % 4, ()))
        expected = np.where([copy in done for copy in range(3)], present, first)
        np.testing.assert_allclose(traces(k)[1], expected, rtol=1e-9)
    assert done == {0, 1, 2}


@each_mode
@pytest.mark.parametrize("stagger", [False, True], ids=["at once", "in turns"])
def test_diagonals_wider_than_the_rank_stay_as_they_are(mode, stagger):
    """Those of a scanned normalisation among them, whose axes are two."""

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm(name="norm", param_dtype=float)(x), None

    class Model(nn.Module):
        dropout: float = 0.0

        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                Normed, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = scanned(name="scanned")(x, None)
            return nn.Dense(small_nets.OUTPUTS, name="last", param_dtype=float)(x)

    like = deep()
    params = Model().init(jax.random.key(0), like.x[0])["params"]
    net = kw.instrument(Model(), kw.Categorical(), like.x[0], fisher="empirical")
    problem = small_nets.Problem(Model(), net, params, like.x, like.y)
    inverse = kw.Inverse(stagger=stagger, method="randomized", rank=3)
    tx = kw.kfac(net.layers, LR, damping_mode=mode, refresh_every=2, inverse=inverse)
    params, state = small_nets.jit(problem.step(tx))(params, tx.init(params), 0)
    assert kw.diagnostics(state)["rejected_refreshes"] == 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, problem.params)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.slow
def test_a_wide_side_of_low_rank_is_inverted_in_a_tenth_of_the_time():
    """Measured before and after the full one, as a machine's speed may drift."""
    n, rank = 4096, 128
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(n, 256)) / np.arange(1, 257), jnp.float32)
    factors = [(x @ x.T, jnp.asarray(dense.spd(rng, 16), jnp.float32))]

    def timed(inverse):
        @jax.jit
        def run(factors, old):
            return inverse.make(ProductDamping(), [Kronecker()], factors, GAMMA, old)

        shapes = jax.eval_shape(run, factors, None)
        old = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        program = run.lower(factors, old).compile()

        def seconds():
            begin = time.perf_counter()
            jax.block_until_ready(program(factors, old))
            return time.perf_counter() - begin

        return seconds

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        low = timed(kw.Inverse(method="randomized", rank=rank))
        full = timed(kw.Inverse(method="full"))
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    first, reference, second = low(), full(), low()
    assert min(first, second) <= 0.1 * reference


# --- By width -------------------------------------------------------------------------------------


def shapes_of_inverses(inverse, make=kw.kfac, width=2048):
    """Of a layer whose input side, with the bias, is one wider; nothing is computed."""
    model, x = nn.Dense(8), jax.ShapeDtypeStruct((4, width), np.float32)
    net = kw.instrument(model, kw.Categorical(), x)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    tx = make(net.layers, 0.1, inverse=inverse)
    (inverses,) = jax.eval_shape(tx.init, params).inverses.values()
    return [x.shape for x in jax.tree.leaves(inverses)]


@pytest.mark.parametrize("make", [kw.kfac, kw.so_kldwrm, kw.q_kldwrm])
def test_sides_above_a_width_get_the_cheaper_inverse_unless_told_otherwise(make):
    assert (2049, 512) in shapes_of_inverses(kw.Inverse(), make)
    assert (2048, 2048) in shapes_of_inverses(kw.Inverse(), make, width=2047)
    assert (2049, 2049) in shapes_of_inverses(kw.Inverse(method="full"), make)
    assert (2049, 64) in shapes_of_inverses(kw.Inverse(method="randomized", rank=64), make)


@pytest.mark.parametrize("make", [kw.kfac, kw.q_kldwrm])
def test_chosen_by_width_it_is_the_randomized_one(make, monkeypatch):
    monkeypatch.setattr("kldwrm_jax.curvature.inverse._WIDEST_FULL", 3)
    monkeypatch.setattr("kldwrm_jax.curvature.inverse._RANK", 2)
    problem = small_nets.problem(norm=False)  # sides of 5, 3, 4 and 3

    def step(inverse):
        tx = make(problem.layers, 0.1, inverse=inverse)
        return small_nets.jit(problem.step(tx))(problem.params, tx.init(problem.params), 0)

    _, by_width = step(kw.Inverse())
    for name in ("first", "last"):
        a, g = by_width.inverses[name]
        assert isinstance(a, LowRank)
        assert a.vectors.shape[-1] == 2
        assert not isinstance(g, LowRank)
    assert kw.diagnostics(by_width)["steps"] == 1
