"""Every member under what Optax, JAX and Flax do to transforms and their states."""

import pathlib
import pickle

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import precision
import pytest
import small_nets
from flax import nnx
from flax.core import FrozenDict, freeze

import kldwrm_jax as kw

as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # its name before flax 0.12.7

STEPS = 5
SCHEDULE = optax.linear_schedule(0.3, 0.1, 4)
COMMON = {"refresh_every": 2, "kl_clip": None, "damping": 0.01}
OF_Q = COMMON | {"block_clip": None}
NOTHING_SET = {"learning_rate": None, "refresh_every": 2}
MAKE = {
    "kfac, nothing set": (kw.kfac, NOTHING_SET),
    "kfac": (kw.kfac, COMMON),
    "so": (kw.so_kldwrm, COMMON | {"wake": "taken"}),
    "q": (kw.q_kldwrm, OF_Q),
    "qe": (kw.qe_kldwrm, OF_Q | {"capacity": 2, "inner_steps": 2, "kl_scale": 0.5}),
}
STATIC = {name: {"refresh_every"} for name in MAKE} | {
    "qe": {"refresh_every", "capacity", "inner_steps"}
}
each_member = pytest.mark.parametrize("name", MAKE)


@pytest.fixture(scope="module")
def small():
    return small_nets.problem(norm=False)


def member(name, layers, **other):
    make, arguments = MAKE[name]
    return make(layers, **{"learning_rate": SCHEDULE} | arguments | other)


def copy(tree):
    return jax.tree.map(jnp.array, tree)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tree)


def assert_same(got, expected):
    """Bit for bit, and of the same structure and types."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_close(got, expected, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, expected)


class Run:
    """A jitted, donating training loop of one member, compiled once."""

    def __init__(self, problem, tx):
        self.problem, self.tx = problem, tx
        self.step = small_nets.jit(problem.step(tx), donate_argnums=(0, 1))
        self.trace = [(problem.params, tx.init(problem.params))]
        for k in range(STEPS):
            self.trace.append(self.go(*self.trace[-1], k))

    def go(self, params, state, *ks):
        params, state = copy(params), copy(state)
        for k in ks:
            params, state = self.step(params, state, k)
        return params, state


@pytest.fixture(scope="module")
def runs(small):
    return {name: Run(small, member(name, small.layers)) for name in MAKE}


@each_member
def test_the_runs_that_others_are_compared_with_move_and_stay_finite(name, runs, small):
    params, state = runs[name].trace[-1]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, small.params)
    assert min(jax.tree.leaves(moved)) > 1e-3
    assert kw.diagnostics(state)["refreshes"] == 3
    assert kw.diagnostics(state)["steps"] == STEPS


@each_member
def test_one_compilation_serves_all_steps_and_buffers_can_be_donated(name, runs):
    run = runs[name]
    assert run.step._cache_size() == 1
    params, state = copy(run.trace[0])
    for k in range(3):
        given = params, state._replace(monitor=None)  # whose scalars are written, not read
        params, state = run.step(params, state, k)
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
    assert_same((params, state), run.trace[3])
    assert run.step._cache_size() == 1


@each_member
def test_a_fresh_state_shares_no_buffer_between_fields(name, small):
    state = member(name, small.layers).init(small.params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((small.params, state))]
    assert len(set(pointers)) == len(pointers)


@each_member
def test_jit_equals_no_jit(name, runs, small):
    """Through a refresh, a step without one and, for QE, the inner solver."""
    step, params, state = small.step(runs[name].tx), *runs[name].trace[0]
    for k in range(2):
        params, state = step(params, state, k)
        assert_close(params, runs[name].trace[k + 1][0])


@each_member
def test_a_scan_over_steps_under_a_vmap_over_seeds_equals_loops(name, runs, small):
    run = runs[name]
    step = small.step(run.tx)
    other = jax.tree.map(lambda p: p + 0.1, small.params)
    both = jax.tree.map(lambda *p: jnp.stack(p), small.params, other)

    @small_nets.jit
    @jax.vmap
    def train(params):
        carried = params, run.tx.init(params)
        return jax.lax.scan(lambda c, k: (step(*c, k), None), carried, jnp.arange(4))[0]

    trained, state = train(both)
    expected = run.go(other, run.tx.init(other), *range(4))
    assert_close(jax.tree.map(lambda p: p[0], trained), run.trace[4][0])
    assert_close(jax.tree.map(lambda p: p[1], trained), expected[0])
    np.testing.assert_array_equal(kw.diagnostics(state)["steps"], [4, 4])


# --- Optax's wrappers -----------------------------------------------------------------------------


@each_member
def test_transparent_wrappers_and_injected_hyperparameters_change_nothing(name, runs, small):
    """A chain of apply_if_finite, masked, partition and inject_hyperparams, one in the other."""
    make, arguments = MAKE[name]
    injected = optax.inject_hyperparams(make, static_args=STATIC[name])(
        small.layers, **{"learning_rate": SCHEDULE} | arguments
    )
    everything = jax.tree.map(lambda _: True, small.params)
    labels = {"first": "a", "last": "a"}
    tx = optax.chain(
        optax.identity(),
        optax.apply_if_finite(
            optax.masked(optax.partition({"a": injected}, labels), everything), 3
        ),
    )
    step = small_nets.jit(small.step(tx))
    params, state = small.params, tx.init(small.params)
    trace = [(params, state)]
    for k in range(STEPS):
        params, state = step(params, state, k)
        assert_close(params, runs[name].trace[k + 1][0])
        trace.append((params, state))
    assert step._cache_size() == 1
    assert kw.diagnostics(state)["steps"] == STEPS

    # A hyperparameter is an array of the state: it can be changed without compiling again.
    hyperparams = optax.tree.get(state, "hyperparams")
    if name == "kfac, nothing set":
        assert set(hyperparams) == {"rho", "weight_decay", "true_kl_clip"}
        return
    assert {"learning_rate", "rho", "damping", "weight_decay"} <= set(hyperparams)
    np.testing.assert_allclose(hyperparams["learning_rate"], SCHEDULE(4))
    refreshing, state = trace[4]
    damped = optax.tree.set(state, hyperparams=hyperparams | {"damping": jnp.float32(1e9)})
    near, _ = step(refreshing, damped, 4)
    assert step._cache_size() == 1
    if name != "qe":  # whose inner steps know no damping
        change = optax.tree.norm(jax.tree.map(jnp.subtract, near, refreshing))
        assert change < 0.1 * optax.tree.norm(jax.tree.map(jnp.subtract, params, refreshing))


@each_member
def test_an_injected_capacity_must_be_static(name, small):
    make, arguments = MAKE[name]
    tx = optax.inject_hyperparams(make)(small.layers, **{"learning_rate": 0.1} | arguments)
    if name == "qe":
        with pytest.raises(
            ValueError, match=r"capacity must be .* known when the program is built"
        ):
            tx.init(small.params)
    else:
        jax.eval_shape(tx.init, small.params)


@each_member
def test_multi_steps_is_the_mean_gradient_with_the_last_oracle(name, runs, small):
    accumulated = optax.MultiSteps(runs[name].tx, 2)
    step = small_nets.jit(small.step(accumulated))

    @small_nets.jit
    def by_hand(params, state, k):
        oracle = small.oracle(params, 2 * k + 1)
        losses = [small.oracle(params, 2 * k + i).loss for i in range(2)]
        grads = jax.tree.map(lambda a, b: (a + b) / 2, *(jax.grad(f)(params) for f in losses))
        updates, state = runs[name].tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state

    params, state = small.params, accumulated.init(small.params)
    expected = runs[name].trace[0]
    for k in range(3):
        before = params
        params, state = step(params, state, 2 * k)
        assert_same(params, before)
        params, state = step(params, state, 2 * k + 1)
        expected = by_hand(*expected, k)
        assert_close(params, expected[0])
    assert kw.diagnostics(state)["steps"] == 3


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Embed(6, 3, name="embed")(x).mean(axis=1))
        return nn.Dense(3, name="head")(x)


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, size=(1, 16, 4))
    model = Tokens()
    params = model.init(jax.random.key(0), x[0])["params"]
    net = kw.instrument(model, kw.Categorical(), x[0], fisher="empirical")
    problem = small_nets.Problem(model, net, params, x, x[..., 0] % 3)
    object.__setattr__(problem.model, "dropout", 0.0)
    return problem


def alone(problem, tx, path, params, steps):
    """The trajectory of one leaf under its own transform, along the gradients met."""
    layer, kind = path
    state = tx.init(problem.params[layer][kind])
    for k in range(steps):
        grads = jax.grad(problem.oracle(params[k], k).loss)(params[k])[layer][kind]
        leaf = params[k][layer][kind]
        updates, state = tx.update(grads, state, leaf)
        np.testing.assert_allclose(params[k + 1][layer][kind], leaf + updates, rtol=1e-5, atol=1e-6)


@each_member
def test_partition_gives_the_embedding_to_adam_and_the_rest_to_the_member(name, tokens):
    adam = optax.adam(0.05)
    tx = optax.partition(
        {"adam": adam, "ours": member(name, tokens.layers)}, {"embed": "adam", "head": "ours"}
    )
    step = small_nets.jit(tokens.step(tx))
    params, state, trace = tokens.params, tx.init(tokens.params), [tokens.params]
    losses = []
    for k in range(8):
        losses.append(tokens.oracle(params, k).loss(params))
        params, state = step(params, state, k)
        trace.append(params)
    alone(tokens, adam, ("embed", "embedding"), trace, 2)
    assert losses[-1] < 0.9 * losses[0]
    own = optax.tree.get(state, "factors")
    assert not own["embed"][0].any()  # the block is there, and stays empty
    assert own["head"][0].any()


@pytest.mark.parametrize("name", ["kfac, nothing set", "kfac"])
def test_partition_gives_the_embedding_to_kfac_and_the_rest_to_adam(name, tokens):
    ours = member(name, tokens.layers, damping=0.01)
    adam = optax.adam(0.05)
    tx = optax.partition({"adam": adam, "ours": ours}, {"embed": "ours", "head": "adam"})
    step = small_nets.jit(tokens.step(tx))
    whole = small_nets.jit(tokens.step(ours))
    first, _ = step(tokens.params, tx.init(tokens.params), 0)
    expected, _ = whole(tokens.params, ours.init(tokens.params), 0)
    if name == "kfac":  # a length that is fitted is that of the whole step
        assert_close(first["embed"], expected["embed"])
    else:
        moved, wanted = (
            (p["embed"]["embedding"] - tokens.params["embed"]["embedding"]).ravel()
            for p in (first, expected)
        )
        cosine = moved @ wanted / (jnp.linalg.norm(moved) * jnp.linalg.norm(wanted))
        np.testing.assert_allclose(cosine, 1, rtol=1e-4)
    alone(tokens, adam, ("head", "kernel"), [tokens.params, first], 1)


def test_masked_layers_get_their_gradient_back_and_blocks_do_not_depend_on_it(runs, small):
    mask = {"first": True, "last": False}
    tx = optax.masked(member("kfac", small.layers), mask)
    state, oracle = tx.init(small.params), small.oracle(small.params, 0)
    grads = jax.grad(oracle.loss)(small.params)
    updates, _ = small_nets.jit(tx.update)(grads, state, small.params, oracle=oracle)
    assert_same(updates["last"], grads["last"])
    moved = jax.tree.map(jnp.add, small.params["first"], updates["first"])
    assert_close(moved, runs["kfac"].trace[1][0]["first"])


@each_member
def test_everything_may_be_masked(name, small):
    tx = optax.masked(member(name, small.layers), jax.tree.map(lambda _: False, small.params))
    oracle = small.oracle(small.params, 0)
    state = tx.init(small.params)
    updates, after = jax.eval_shape(tx.update, small.params, state, small.params, oracle=oracle)
    assert jax.tree.structure(updates) == jax.tree.structure(small.params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@each_member
def test_trees_of_the_state_can_be_mapped_and_got(name, runs):
    run = runs[name]
    params, state = run.trace[-1]
    twice = optax.tree.map_params(run.tx, lambda x: 2 * x, state)
    assert_same(twice.factors, state.factors)
    assert_same(twice.monitor, state.monitor)
    for field in ("g_prev", "g_hat", "pull", "history"):
        before = optax.tree.get(state, field)
        assert (before is None) == (
            name.startswith("kfac") or (field == "history" and name != "qe")
        )
        if before is not None:
            assert_same(getattr(twice, field), jax.tree.map(lambda x: 2 * x, before))
    assert set(optax.tree.get(state, "factors")) == {"first", "last"}
    # Sharding or checkpointing by parameter: a label for each of them arrives at its place.
    labels = jax.tree.map(lambda x: f"shape {x.shape}", params)
    labelled = optax.tree.map_params(
        run.tx, lambda _, label: label, state, labels, transform_non_params=lambda _: "other"
    )
    if name == "kfac, nothing set":
        assert labelled.last_step == labelled.offset == labels
    elif name != "kfac":
        assert labelled.g_hat == labels


# --- Programs -------------------------------------------------------------------------------------


def trace_update(tx, params, oracle, **extra):
    """The update's program, whatever holds the parameters."""
    state = tx.init(params)
    return str(
        jax.make_jaxpr(lambda g, s, p, o: tx.update(g, s, p, oracle=o, **extra))(
            params, state, params, oracle
        )
    )


@each_member
@pytest.mark.parametrize("container", [freeze, nnx.State], ids=["FrozenDict", "nnx.State"])
def test_the_container_of_the_parameters_does_not_matter(name, container, runs, small):
    """The very same program, with the same structure around it."""
    tx = runs[name].tx
    held = container(small.params)
    oracle = small.oracle(small.params, 0)
    assert trace_update(tx, held, oracle) == trace_update(tx, small.params, oracle)
    state = tx.init(held)
    updates, after = jax.eval_shape(tx.update, held, state, held, oracle=oracle)
    assert jax.tree.structure(updates) == jax.tree.structure(held)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    if not name.startswith("kfac"):
        assert isinstance(state.g_hat, FrozenDict | nnx.State)


@each_member
def test_a_state_made_for_nnx_params_takes_bare_arrays(name, runs, small):
    """As nnx.Optimizer does: init sees Param nodes, update sees bare arrays."""
    tx = runs[name].tx
    nodes = nnx.State(jax.tree.map(nnx.Param, small.params))
    arrays = as_pure(nodes)
    oracle = small.oracle(small.params, 0)
    state = as_pure(tx.init(nodes))
    updates, after = jax.eval_shape(tx.update, arrays, state, arrays, oracle=oracle)
    assert jax.tree.structure(updates) == jax.tree.structure(arrays)
    assert shapes(after) == shapes(state)


@each_member
def test_unknown_extra_arguments_are_ignored(name, runs, small):
    oracle = small.oracle(small.params, 0)
    plain = trace_update(runs[name].tx, small.params, oracle)
    assert trace_update(runs[name].tx, small.params, oracle, value=1.0, value_fn=abs) == plain


@each_member
def test_a_missing_oracle_is_an_error_that_names_the_train_state(name, runs, small):
    tx = optax.chain(runs[name].tx)
    with pytest.raises(ValueError, match=r"oracle=net.oracle\(.*kldwrm_jax.TrainState"):
        tx.update(small.params, tx.init(small.params), small.params)


@each_member
def test_init_may_be_abstract(name, runs, small):
    tx = runs[name].tx
    concrete = shapes(tx.init(small.params))
    assert jax.eval_shape(tx.init, small.params) == concrete
    assert jax.eval_shape(tx.init, shapes(small.params)) == concrete
    assert shapes(tx.init(shapes(small.params))) == concrete
    oracle = small.oracle(small.params, 0)
    updates, after = jax.eval_shape(tx.update, small.params, concrete, small.params, oracle=oracle)
    assert updates == shapes(small.params)
    assert after == concrete


def conds(jaxpr):
    """Every cond of a program, outermost first, as lists of their branches' programs."""
    for equation in jaxpr.eqns:
        branches = equation.params.get("branches", ())
        if branches:
            yield [branch.jaxpr for branch in branches]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is not None and not branches:
                yield from conds(inner)


def primitives(jaxpr, into_conds):
    """Names of all primitives of a program."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        branches = equation.params.get("branches", ())
        inner = [b.jaxpr for b in branches] if into_conds else []
        inner += [v.jaxpr for v in equation.params.values() if hasattr(v, "jaxpr")]
        for other in inner:
            yield from primitives(other, into_conds)


@each_member
@pytest.mark.parametrize("period", [1, 30])
def test_statistics_are_under_a_cond_only_where_they_are_not_due_every_step(name, period, small):
    """With a period of 1 no pass is, so that XLA can merge the two.

    Decompositions are under the same one where a refresh solves with its own statistics, and under
    the next where it does not.
    """
    tx = member(name, small.layers, refresh_every=period)
    oracle = small.oracle(small.params, 0)
    jaxpr = jax.make_jaxpr(lambda g, s, p, o: tx.update(g, s, p, oracle=o))(
        small.params, tx.init(small.params), small.params, oracle
    ).jaxpr
    if name == "kfac, nothing set":
        pytest.skip("its fit is a branch of its own, which runs the network")
    decomposition = {"kfac": "eigh", "so": "eigh", "q": "cholesky", "qe": "cholesky"}[name]
    statistics = "tanh"  # of the oracle's forward pass

    outside = set(primitives(jaxpr, into_conds=False))
    found = [[set(primitives(b, into_conds=True)) for b in branches] for branches in conds(jaxpr)]
    if name == "qe":
        start = found.pop()  # of the inner solver, which runs the network but decomposes nothing
        assert all(decomposition not in branch for branch in start)
    if period == 1:
        assert "tanh" in outside
        assert all("tanh" not in branch for branches in found for branch in branches)
    else:
        (without, refreshing), *later = found
        assert statistics in refreshing
        assert statistics not in outside | without
        (_, inverting) = later[0] if later else found[0]
        assert decomposition in inverting
        assert decomposition not in outside | without
        assert (decomposition in refreshing) == (name in ("q", "qe"))


# --- Types ----------------------------------------------------------------------------------------


@each_member
def test_bfloat16_parameters_have_float32_curvature(name, runs, small):
    problem = small_nets.problem(dtype=jnp.bfloat16, norm=False)
    tx = member(name, problem.layers)
    step = small_nets.jit(problem.step(tx))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), small.params)
    state = tx.init(params)
    for k in range(3):
        params, state = step(params, state, k)
    assert step._cache_size() == 1
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    kept = state._replace(history=None, count=None, outlier_streak=None, monitor=None, fit=None)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(jnp.float32)}
    # The network computes in bfloat16: about the same way, not the same steps.
    expected, start = runs[name].trace[3][0], runs[name].trace[0][0]
    for layer in params:
        for kind, p in params[layer].items():
            moved, wanted = p - start[layer][kind], expected[layer][kind] - start[layer][kind]
            assert jnp.linalg.norm(moved - wanted) < 0.3 * jnp.linalg.norm(wanted)


@each_member
def test_float32_parameters_under_x64_have_float64_curvature(name, runs, small):
    with precision.x64(True):
        problem = small_nets.problem(norm=False)
        tx = member(name, problem.layers)
        state, oracle = tx.init(problem.params), problem.oracle(problem.params, 0)
        updates, after = jax.eval_shape(
            tx.update, problem.params, state, problem.params, oracle=oracle
        )
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
        assert shapes(after) == shapes(state)
        floats = state._replace(
            history=None, count=None, outlier_streak=None, monitor=None, fit=None
        )
        assert {x.dtype for x in jax.tree.leaves(floats)} == {jnp.dtype(jnp.float64)}
        step = small_nets.jit(problem.step(tx))
        params, _ = step(problem.params, state, 0)
        assert_close(params, runs[name].trace[1][0], 1e-4)


# --- Checkpoints ----------------------------------------------------------------------------------


def through_pickle(tree, directory):
    return pickle.loads(pickle.dumps(tree))


def through_numpy(tree, directory):
    return jax.tree.map(lambda x: jnp.asarray(np.array(x)), tree)


def through_flax_bytes(tree, directory):
    empty = jax.tree.map(jnp.zeros_like, tree)
    return flax.serialization.from_bytes(empty, flax.serialization.to_bytes(tree))


def through_flax_state_dict(tree, directory):
    packed = flax.serialization.msgpack_serialize(flax.serialization.to_state_dict(tree))
    empty = jax.tree.map(jnp.zeros_like, tree)
    restored = flax.serialization.msgpack_restore(packed)
    return flax.serialization.from_state_dict(empty, restored)


def through_orbax(tree, directory):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "checkpoint", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "checkpoint", shapes(tree))


@each_member
@pytest.mark.parametrize(
    "through",
    [through_numpy, through_pickle, through_flax_bytes, through_flax_state_dict, through_orbax],
)
def test_a_run_resumes_bit_for_bit(name, through, runs, tmp_path):
    run = runs[name]
    resumed = jax.tree.map(jnp.asarray, through(run.trace[3], tmp_path))
    assert_same(resumed, run.trace[3])
    assert_same(run.go(*resumed, 3, 4), run.trace[5])


@pytest.mark.parametrize("through", [through_pickle, through_flax_bytes, through_orbax])
def test_block_names_with_slashes_survive_checkpoints(through, tmp_path):
    problem = small_nets.problem()
    tx = member("qe", problem.layers)
    state = tx.init(problem.params)
    assert "norm/scale" in state.factors
    state = jax.tree.map(lambda x: x + 1, state)
    assert_same(jax.tree.map(jnp.asarray, through(state, tmp_path)), state)


def _asks_for_the_oracle():
    def update(updates, state, params=None, *, oracle, **_):
        return jax.tree.map(lambda g: oracle * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


WRAPPERS = {
    "chain": optax.chain,
    "named_chain": lambda tx: optax.named_chain(("own", tx)),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"own": tx}, {"w": "own"}),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda: tx)(),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 1),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda k, **_: True),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda k, **_: True),
    "contrib.schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1.0),
    "contrib.mechanize": optax.contrib.mechanize,
}
NO_WRAPPERS = {
    "lookahead": (lambda tx: optax.lookahead(tx, 2, 0.5), optax.LookaheadParams.init_synced),
    "contrib.sam": (lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)), lambda params: params),
    "contrib.split_real_and_imaginary": (
        optax.contrib.split_real_and_imaginary,
        lambda params: params,
    ),
}


COMPOSING = (pathlib.Path(__file__).parents[2] / "docs" / "composing.md").read_text()


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_wrappers_that_composing_md_lists_pass_the_oracle_on(name):
    tx, params = WRAPPERS[name](_asks_for_the_oracle()), {"w": jnp.ones(2)}
    tx.update(params, tx.init(params), params, oracle=3.0)
    assert f"`{name}`" in COMPOSING.replace("`optax.", "`")


@pytest.mark.parametrize("name", NO_WRAPPERS)
def test_the_wrappers_that_composing_md_warns_of_do_not(name):
    make, start = NO_WRAPPERS[name]
    tx, params = make(_asks_for_the_oracle()), start({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="oracle"):
        tx.update(params, tx.init(params), params, oracle=3.0)
    assert f"`{name}`" in COMPOSING.replace("`optax.", "`")
