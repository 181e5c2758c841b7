"""What holds on eight devices: ``python eight_devices.py CHECK`` runs one check in this process.

A process has the devices it was started with, so that ``test_many_devices.py`` starts one for each.
"""

import functools
import re
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)  # so that what differs, differs

import flax.linen as nn  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import kldwrm_jax as kw  # noqa: E402

BATCH, CLASSES = 32, 8
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
MEMBERS = {
    "nothing set": (kw.kfac, {"learning_rate": None}),
    # As many examples as a part of a batch in four parts has: no more are measured of it.
    "fitted by a part": (kw.kfac, {"learning_rate": None, "fit": kw.Fit(examples=8)}),
    "kfac": (kw.kfac, {}),
    "so": (kw.so_kldwrm, {}),
    "q": (kw.q_kldwrm, {}),
    "qe": (kw.qe_kldwrm, {"capacity": 2, "inner_steps": 3}),
}
RATE = {"learning_rate": 0.1}


class Net(nn.Module):
    """Layers of which two are of equal size."""

    partitioned: bool = False

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.tanh(self.dense(8, f"dense{i}")(x))
        return self.dense(CLASSES, "last")(nn.LayerNorm(param_dtype=float)(x))

    def dense(self, features, name):
        kernel = nn.initializers.lecun_normal()
        if self.partitioned:
            kernel = nn.with_partitioning(kernel, (None, "data"))
        return nn.Dense(features, kernel_init=kernel, param_dtype=float, name=name)


class Problem:
    """A network, its batches, and a step on one device or on a mesh of eight."""

    def __init__(self, fisher="empirical", bias="joint", **options):
        self.model = Net(**options)
        self.x = jax.random.normal(jax.random.key(0), (3, BATCH, 24))
        self.y = jax.random.randint(jax.random.key(1), (3, BATCH), 0, CLASSES)
        self.net = kw.instrument(self.model, kw.Categorical(), self.x[0], fisher=fisher, bias=bias)
        self.params = self.model.init(jax.random.key(2), self.x[0])["params"]
        self.mesh = Mesh(np.array(jax.devices()), ("data",))

    def sharding(self, *axes):
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def step(self, tx, jit=None, **of_oracle):
        @functools.partial(jax.jit, **jit or {})
        def step(params, state, x, y, key):
            oracle = self.net.oracle(params, x, targets=y, key=key, **of_oracle)
            grads = jax.grad(oracle.loss)(params)
            updates, state = tx.update(grads, state, params, oracle=oracle)
            return optax.apply_updates(params, updates), state

        return step

    def batch(self, k, sharded):
        x, y = self.x[k % 3], self.y[k % 3]
        return jax.device_put((x, y), self.sharding("data")) if sharded else (x, y)

    def run(self, tx, *, sharded, steps=7, layout=None, jit=None, **of_oracle):
        """Parameters and state after some steps, and the step."""
        step = self.step(tx, jit, **of_oracle)
        params, state = self.params, tx.init(self.params)
        if sharded:
            params, state = jax.device_put((params, state), layout or self.sharding())
        for k in range(steps):
            params, state = step(params, state, *self.batch(k, sharded), jax.random.key(k))
        return params, state, step


def assert_close(a, b, tolerance):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * max(np.abs(y).max(initial=0), 1e-2)
        ),
        jax.device_get(a),
        jax.device_get(b),
    )


def remembered(state):
    """All of a state but its diagnostics, and inverses, whose eigenvectors may have other signs."""
    return state._replace(monitor=None, inverses=None)


def collectives(step, *args):
    """The kinds of communication in the compiled step, and the shapes they are of."""
    text = step.lower(*args).compile().as_text()
    found = re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return {kind: [shape for shape, other in found if other == kind] for _, kind in found}


def data_parallel(name):
    """A batch sharded over devices gives the statistics, the divergences and the steps of one."""
    make, arguments = MEMBERS[name]
    problem = Problem("empirical" if name == "qe" else "sampled")
    tx = make(problem.net.layers, **RATE | arguments, refresh_every=3)
    params, state, _ = problem.run(tx, sharded=False)
    others, other, step = problem.run(tx, sharded=True)
    assert_close(others, params, 1e-8)
    assert_close(remembered(other), remembered(state), 1e-7)
    scalars, tell = kw.diagnostics(other), kw.diagnostics(state)
    assert_close(scalars["objective_after"], tell["objective_after"], 1e-7)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((others, other)))
    found = collectives(step, others, other, *problem.batch(0, True), jax.random.key(0))
    # What is summed over the batch is summed over devices, and nothing else travels.
    assert set(found) == {"all-reduce"}, found


INVERSES = {
    "nothing set": (kw.kfac, {"learning_rate": None}, {}),
    "product": (kw.kfac, {}, {}),
    "factored": (kw.kfac, {"damping_mode": "factored"}, {}),
    "exact": (kw.q_kldwrm, {}, {}),
    "reweighted": (kw.q_kldwrm, {"solver": "reweighted"}, {}),
    "staggered": (kw.so_kldwrm, {}, {"stagger": True}),
    "randomized": (kw.kfac, {}, {"method": "randomized", "rank": 5}),
}


def shared_refresh(name):
    """Each device does some of the decompositions, and the steps are those of one device."""
    make, arguments, inverse = INVERSES[name]
    problem = Problem()

    def tx(**mesh):
        made = kw.Inverse(**inverse, **mesh)
        return make(problem.net.layers, **RATE | arguments, refresh_every=3, inverse=made)

    params, state, _ = problem.run(tx(), sharded=False)
    shared = tx(mesh=problem.mesh, axis="data")
    others, other, step = problem.run(shared, sharded=True)
    assert_close(others, params, 1e-8)
    assert_close(remembered(other), remembered(state), 1e-7)
    args = (others, other, *problem.batch(0, True), jax.random.key(0))
    assert set(collectives(step, *args)) == {"all-reduce"}
    print("decompositions", *decompositions(jax.make_jaxpr(step)(*args).jaxpr))


def decompositions(jaxpr):
    """How many a device does, at most, and how many there are: in branches that devices have."""
    counts = []

    def inner(eqn):
        for value in eqn.params.values():
            for x in value if isinstance(value, tuple | list) else [value]:
                if hasattr(x, "jaxpr") or hasattr(x, "eqns"):
                    yield getattr(x, "jaxpr", x)

    def count(jaxpr):
        """Matrices that are decomposed; a loop counts as often as it runs."""
        total = 0
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            total += name in ("cholesky", "eigh")
            own = [count(x) for x in inner(eqn)]
            if name == "scan":
                total += eqn.params["length"] * sum(own)
            elif name == "cond":  # platforms, of which there is one
                total += max(own)
            else:
                total += sum(own)
        return total

    def walk(jaxpr, within):
        for eqn in jaxpr.eqns:
            if within and eqn.primitive.name == "cond" and len(eqn.params["branches"]) > 2:
                counts.append([count(x.jaxpr) for x in eqn.params["branches"]])
                continue
            for x in inner(eqn):
                walk(x, within or eqn.primitive.name == "shard_map")

    walk(jaxpr, False)
    return max(max(own) for own in counts), sum(sum(own) for own in counts)


def sharded_parameters(name):
    """Parameters over devices (FSDP): what is shaped like them stays with them, all else works."""
    boxed = name == "so"  # by the model itself, or from outside
    problem = Problem(partitioned=boxed)
    if boxed:
        specs = nn.get_partition_spec(problem.params)
        shardings = jax.tree.map(
            lambda p, spec: _like_box(p, NamedSharding(problem.mesh, spec)),
            problem.params,
            specs,
            is_leaf=_is_box,
        )
    else:

        def over_columns(p):
            whole = p.ndim < 2 or p.shape[-1] % 8
            return problem.sharding() if whole else problem.sharding(None, "data")

        shardings = jax.tree.map(over_columns, problem.params)
    make, arguments = MEMBERS[name]
    tx = make(problem.net.layers, **RATE | arguments, refresh_every=3)

    def along(x, sharding):
        """A ring buffer has an axis more."""
        return problem.sharding(None, *sharding.spec) if x.ndim > len(sharding.spec) else sharding

    layout = optax.tree.map_params(
        tx,
        along,
        jax.eval_shape(tx.init, problem.params),
        shardings,
        transform_non_params=lambda _: problem.sharding(),
    )
    params, state, _ = problem.run(tx, sharded=False)
    others, other, step = problem.run(tx, sharded=True, layout=(shardings, layout))
    assert_close(nn.unbox(others), nn.unbox(params), 1e-8)
    assert_close(nn.unbox(remembered(other)), nn.unbox(remembered(state)), 1e-7)
    kernel = nn.unbox(others)["dense0"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "data"), kernel.sharding
    for field in ("g_prev", "g_hat", "pull", "history", "last_step", "offset"):
        tree = getattr(other, field)
        if tree is not None:
            found = nn.unbox(tree)["dense0"]["kernel"].sharding
            assert found.spec[-1] == "data", (field, found)
    # Kernels travel, as they must; nothing as large as a factor does.
    found = gathered(step, others, other, *problem.batch(0, True), jax.random.key(0))
    assert "f64[24,8]" in found
    assert "f64[25,25]" not in found


def gathered(step, *args):
    """Shapes of what is gathered on every step: outside of conditionals."""
    text = step.lower(*args).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    return re.findall(r"= (\w+\[[\d,]*\])\S* all-gather(?:-start)?\(", entry)


def sharded_factors(mode):
    """Factors and inverses over devices, by rows: they stay there, and are not gathered."""
    problem = Problem(bias="separate")
    tx = kw.kfac(problem.net.layers, 0.1, refresh_every=3, damping_mode=mode)

    def by_rows(x):
        return problem.sharding("data") if x.ndim and x.shape[0] % 8 == 0 else problem.sharding()

    abstract = jax.eval_shape(tx.init, problem.params)
    layout = jax.tree.map(lambda _: problem.sharding(), abstract)
    layout = layout._replace(
        factors=jax.tree.map(by_rows, abstract.factors),
        inverses=jax.tree.map(by_rows, abstract.inverses),
    )
    params, state, _ = problem.run(tx, sharded=False)
    everywhere = jax.tree.map(lambda _: problem.sharding(), problem.params)
    keep = {"out_shardings": (everywhere, layout)}
    layouts = (everywhere, layout)
    others, other, step = problem.run(tx, sharded=True, layout=layouts, jit=keep)
    assert_close(others, params, 1e-8)
    assert_close(remembered(other), remembered(state), 1e-7)
    for x in jax.tree.leaves((other.factors["dense0/kernel"], other.inverses["dense0/kernel"])):
        assert x.addressable_shards[0].data.size * 8 == x.size, x.sharding
    found = gathered(step, others, other, *problem.batch(0, True), jax.random.key(0))
    assert "f64[24,24]" not in found, found


def _is_box(x):
    return isinstance(x, nn.Partitioned)


def _like_box(box, x):
    return box.replace_boxed(x) if _is_box(box) else x


def micro_batches(name):
    """A batch in parts, over devices or not, gives what the whole batch gives."""
    make, arguments = MEMBERS[name]
    problem = Problem()
    tx = make(problem.net.layers, **RATE | arguments, refresh_every=3)
    params, state, _ = problem.run(tx, sharded=False)
    for sharded in (False, True):
        others, other, _ = problem.run(tx, sharded=sharded, micro_batches=4)
        assert_close(others, params, 1e-8)
        assert_close(remembered(other), remembered(state), 1e-7)


CHECKS = {
    **{f"data_parallel {name}": (data_parallel, name) for name in MEMBERS},
    **{f"shared_refresh {name}": (shared_refresh, name) for name in INVERSES},
    **{
        f"sharded_parameters {name}": (sharded_parameters, name)
        for name in ("nothing set", "so", "qe")
    },
    **{f"sharded_factors {mode}": (sharded_factors, mode) for mode in ("factored", "product")},
    **{f"micro_batches {name}": (micro_batches, name) for name in ("fitted by a part", "so", "qe")},
}

if __name__ == "__main__":
    for check in sys.argv[1:]:
        function, argument = CHECKS[check]
        function(argument)
        print("held:", check, flush=True)
