"""Every member with the whole Fisher, against the propositions with brute-force matrices."""

import dataclasses

import dense_family
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import precision
import pytest
import small_nets
from dense_family import Inner, Member
from optimizers.trajectories import STEPS, assert_close, schedule, trajectory

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

STRUCTURES = ["layer", "network"]
each_structure = pytest.mark.parametrize("structure", STRUCTURES)


def with_structure(problem, structure):
    net = kw.instrument(problem.model, problem.net.likelihood, problem.x[0], structure=structure)
    return dataclasses.replace(problem, net=net)


@pytest.fixture(scope="module", params=["categorical", "gaussian"])
def problems(request):
    likelihood = {"categorical": kw.Categorical(), "gaussian": kw.Gaussian(0.4)}[request.param]
    with precision.x64(True):
        small = small_nets.problem(likelihood, dtype=jnp.float64)
        return {structure: with_structure(small, structure) for structure in STRUCTURES}


@dataclasses.dataclass(frozen=True)
class BruteForce:
    """A problem whose Fisher comes from ``jax.jacrev``, and is cut into blocks in the test."""

    problem: small_nets.Problem
    structure: str

    @property
    def params(self):
        return self.problem.params

    @property
    def net(self):
        return self.problem.net

    def oracle(self, params, k):
        return self.problem.oracle(params, k)

    def measure(self, params, k):
        grads = jax.grad(self.oracle(params, k).loss)(params)
        whole = dense_family.fisher(self.problem, params, k)
        places = dense_family.Blocks(params).places
        if self.structure == "network":
            return grads, {"network": whole}
        starts = {}
        for (layer, _), place in places.items():
            low, high = starts.get(layer, (place.start, place.stop))
            starts[layer] = min(low, place.start), max(high, place.stop)
        return grads, {layer: whole[a:b, a:b] for layer, (a, b) in starts.items()}


def damped(blocks, f, gamma):
    """``F + gamma I``, the one way to damp a dense block."""
    return blocks.matrix(f) + gamma * np.eye(blocks.size)


def in_order_of(layers, name, params):
    """Where a block's parameters are in the vector of `dense_family`."""
    places = dense_family.Blocks(params).places
    everything = np.arange(sum(place.stop - place.start for place in places.values()))
    own = [everything[places[tuple(p.path.split("/"))]] for p in layers[name].parameters]
    return np.concatenate(own)


def assert_follows(problem, structure, tx, member, rtol=1e-9):
    blocks = dense_family.Blocks(problem.params)
    start = blocks.vector(problem.params)
    wanted = dense_family.run(BruteForce(problem, structure), member)
    got = trajectory(problem, tx, len(member.lrs))
    for (params, state), own in zip(got, wanted, strict=True):
        assert_close(blocks.vector(params) - start, blocks.vector(own["params"]) - start, rtol)
        for name, f in own["factors"].items():
            order = in_order_of(problem.layers, name, problem.params)
            order = order - order.min()
            assert_close(state.factors[name], f[np.ix_(order, order)], rtol)
        if member.wake is not None:
            assert_close(blocks.vector(state.g_hat), own["g_hat"], rtol)
        if member.wake == "taken":
            assert_close(blocks.vector(state.pull), own["pull"], rtol)


# Steps without a limit need a rate and a damping that keep them small.
LRS, DAMPING = [0.05] * STEPS, 0.1
MOVING = [0.05, 0.02, 0.1, 0.1, 0.01, 0.05, 0.05, 0.03]
EVERY = {"refresh_every": 1, "kl_clip": None, "true_kl_clip": None, "damping": DAMPING}


def member(lrs, rho, **kwargs):
    return Member(lrs, rho, damping=DAMPING, mode=damped, **kwargs)


MEMBERS = {
    "kfac, Prop. 3.1": (kw.kfac, {}, member(LRS, 0.95, wake=None)),
    "kfac, every third step": (
        kw.kfac,
        {"refresh_every": 3, "rho": 0.6},
        member(LRS, 0.6, wake=None, period=3),
    ),
    "so, Prop. 4.1": (kw.so_kldwrm, {}, member(LRS, 0.33)),
    "so, nu = rho is K-FAC": (
        kw.so_kldwrm,
        {"nu": 0.33},
        member(LRS, 0.33, wake=None),
    ),
    "q, Prop. 4.2": (
        kw.q_kldwrm,
        {"block_clip": None},
        member(LRS, 0.5, model="exact"),
    ),
    "q, Prop. A.1": (
        kw.q_kldwrm,
        {"block_clip": None, "learning_rate": schedule(MOVING)},
        member(MOVING, 0.5, model="exact"),
    ),
    "q, every fourth step, a schedule, the wake taken, decay, clips": (
        kw.q_kldwrm,
        {
            "learning_rate": schedule(MOVING),
            "refresh_every": 4,
            "wake": "taken",
            "weight_decay": 0.1,
            "kl_clip": 0.01,
            "block_clip": 0.3,
        },
        member(
            MOVING,
            0.5,
            model="exact",
            wake="taken",
            period=4,
            weight_decay=0.1,
            kl_clip=0.01,
            block_clip=0.3,
        ),
    ),
    "q, reweighted": (
        kw.q_kldwrm,
        {"block_clip": None, "solver": "reweighted"},
        member(LRS, 0.5, model="reweighted"),
    ),
}


@each_structure
@pytest.mark.parametrize("name", MEMBERS)
def test_steps_are_those_of_the_propositions_with_the_whole_fisher(problems, structure, name):
    make, arguments, own = MEMBERS[name]
    problem = problems[structure]
    tx = make(problem.layers, **{"learning_rate": LRS[0]} | EVERY | arguments)
    if arguments.get("nu"):  # as a wake of linear models; its g_hat is another
        trace = trajectory(problem, tx)
        wanted = dense_family.run(BruteForce(problem, structure), own)
        blocks = dense_family.Blocks(problem.params)
        for (params, _), x in zip(trace, wanted, strict=True):
            assert_close(blocks.vector(params), blocks.vector(x["params"]))
        return
    assert_follows(problem, structure, tx, own)


@each_structure
def test_qe_improves_the_q_step_on_the_exact_divergence(problems, structure):
    problem = problems[structure]

    def divergence(k, one, other):
        oracle = problem.oracle(one, k)
        return oracle.divergence(oracle.outputs(one), oracle.outputs(other))

    inner = Inner(divergence, capacity=3, steps=2, omega=0.07, kl_scale=1.0)
    own = member(LRS[:5], 0.5, model="exact", inner=inner)
    arguments = {"capacity": 3, "inner_steps": 2, "kl_scale": 1.0, "block_clip": None}
    tx = kw.qe_kldwrm(problem.layers, LRS[0], **EVERY, **arguments)
    assert_follows(problem, structure, tx, own)


@each_structure
def test_steps_under_jit_are_those_outside_of_it(problems, structure):
    problem = problems[structure]
    tx = kw.q_kldwrm(problem.layers, 0.3, refresh_every=2)
    step, state, params = problem.step(tx), tx.init(problem.params), problem.params
    for k, (wanted, _) in enumerate(trajectory(problem, tx, 3)):
        params, state = step(params, state, k)
        jax.tree.map(assert_close, params, wanted)


@each_structure
def test_seeds_are_mapped_over(problems, structure):
    problem = problems[structure]
    tx = kw.so_kldwrm(problem.layers, 0.3, refresh_every=2)
    seeds = [problem.params, jax.tree.map(lambda p: 0.5 * p, problem.params)]
    step = small_nets.jit(jax.vmap(problem.step(tx), in_axes=(0, 0, None)))
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *seeds)
    state = jax.vmap(tx.init)(params)
    for k in range(3):
        params, state = step(params, state, k)
    for i, own in enumerate(seeds):
        alone = trajectory(dataclasses.replace(problem, params=own), tx, 3)[-1][0]
        jax.tree.map(lambda got, x, i=i: assert_close(got[i], x), params, alone)


@each_structure
def test_the_batch_in_parts_gives_the_same_steps(problems, structure):
    problem = problems[structure]
    x, y = jnp.asarray(problem.x[0]), jnp.asarray(problem.y[0])
    whole = problem.net.oracle(problem.params, x, targets=y)
    parts = problem.net.oracle(problem.params, x, targets=y, micro_batches=4)
    jax.tree.map(assert_close, parts.factors(), whole.factors())


@each_structure
@pytest.mark.parametrize("make", [kw.kfac, kw.so_kldwrm, kw.q_kldwrm, kw.qe_kldwrm])
def test_a_small_net_trains_with_nothing_set(structure, make):
    model = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(3)])
    x = jax.random.normal(jax.random.key(0), (32, 4))
    y = jnp.argmax(x[:, :3], axis=-1)
    net = kw.instrument(model, kw.Categorical(), x, structure=structure)
    params = model.init(jax.random.key(1), x)["params"]
    tx = make(net.layers)

    @small_nets.jit
    def step(params, state):
        loss, grads, oracle = net.value_and_grad(params, x, targets=y)
        updates, state = tx.update(grads, state, params, oracle=oracle)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    for _ in range(40):
        params, state, loss = step(params, state)
    assert loss < 0.1


@each_structure
@pytest.mark.parametrize("mode", ["factored", "product"])
def test_modes_of_damping_are_refused(problems, structure, mode):
    layers = problems[structure].layers
    for make in (kw.kfac, kw.so_kldwrm, kw.q_kldwrm, kw.qe_kldwrm, kw.precondition):
        with pytest.raises(ValueError, match=f"damping_mode='{mode}' .* leave damping_mode out"):
            make(layers, damping_mode=mode)


def test_half_a_network_is_refused_and_a_whole_layer_is_not(problems):
    mask = {"first": True, "norm": False, "last": True}
    with pytest.raises(ValueError, match="structure='layer', or 'kronecker' and"):
        optax.masked(kw.kfac(problems["network"].layers), mask).init(problems["network"].params)
    problem = problems["layer"]
    tx = optax.masked(kw.kfac(problem.layers, 0.3, refresh_every=1), mask)
    free = kw.kfac(problem.layers, 0.3, refresh_every=1, kl_clip=None)
    grads, oracle = jax.grad(problem.oracle(problem.params, 0).loss), problem.oracle
    updates, _ = tx.update(
        grads(problem.params),
        tx.init(problem.params),
        problem.params,
        oracle=oracle(problem.params, 0),
    )
    alone, _ = free.update(
        grads(problem.params),
        free.init(problem.params),
        problem.params,
        oracle=oracle(problem.params, 0),
    )
    own, all_of_it = updates["first"]["kernel"], alone["first"]["kernel"]
    scale = jnp.vdot(own, all_of_it) / jnp.vdot(all_of_it, all_of_it)
    assert_close(own, scale * all_of_it)  # the same direction, limited with others


def test_long_runs_of_the_same_batches_stay_finite(problems):
    problem = problems["network"]
    got = trajectory(problem, kw.kfac(problem.layers, 0.3, refresh_every=1), 2 * STEPS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got[-1][0]))
