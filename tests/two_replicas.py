"""What holds on two replicas: ``python two_replicas.py CHECK`` runs one check in this process.

A process has the devices it was started with: ``test_axis_name.py`` starts one for each group.
"""

import sys
import warnings

import jax

# Two of eight: XLA has a thread for each, of which a collective holds as many as it joins.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)  # so that what differs, differs

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

import kldwrm_jax as kw  # noqa: E402

BATCH, CLASSES, STEPS = 16, 3, 50
MEMBERS = {
    "kfac": (kw.kfac, {}),
    "so": (kw.so_kldwrm, {}),
    "q": (kw.q_kldwrm, {"calibrate": True}),
    "qe": (kw.qe_kldwrm, {"capacity": 2, "inner_steps": 2}),
}
DEVICES = jax.devices()[:2]
MESH = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=DEVICES)


class Net(nn.Module):
    """A matrix product, a normalisation, a parameter without a rule."""

    uncovered: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(param_dtype=float)(nn.tanh(nn.Dense(4, param_dtype=float)(x)))
        if self.uncovered:
            x = x * self.param("gain", nn.initializers.ones, (4,), float)
        return nn.Dense(CLASSES, param_dtype=float)(x)


class Problem:
    """A network, its batches, and training on one device or on two replicas."""

    def __init__(self, make, fisher="empirical", model=None, **arguments):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=(5, BATCH, 6)), rng.integers(0, CLASSES, (5, BATCH))
        self.w = rng.uniform(size=(5, BATCH)) * (rng.uniform(size=(5, BATCH)) > 0.2)
        self.model = model or Net()
        self.params = self.model.init(jax.random.key(2), self.x[0])["params"]
        self.options = {"fisher": fisher}
        self.tx = make(self.instrument().layers, 0.1, refresh_every=3, **arguments)

    def instrument(self, **options):
        return kw.instrument(
            self.model, kw.Categorical(), self.x[0], **self.options | options
        )

    def train(self, net, way="value_and_grad", *, weighted=False, micro_batches=1):
        """A function that trains on the part of the batches that it is given."""

        def train(x, y, w):
            def step(carried, k):
                params, state = carried
                i = k % len(x)
                arguments = {
                    "targets": y[i],
                    "key": jax.random.fold_in(jax.random.key(3), k),
                    "weights": w[i] if weighted else None,
                    "micro_batches": micro_batches,
                }
                if way == "value_and_grad":
                    loss, grads, oracle = net.value_and_grad(params, x[i], **arguments)
                else:
                    oracle = net.oracle(params, x[i], **arguments)
                    loss, grads = jax.value_and_grad(oracle.loss)(params)
                if way == "pmean":  # as one does with a loss of one's own
                    loss, grads = lax.pmean((loss, grads), "batch")
                updates, state = self.tx.update(grads, state, params, oracle=oracle)
                return (optax.apply_updates(params, updates), state), loss

            start = (self.params, self.tx.init(self.params))
            (params, state), losses = lax.scan(step, start, jnp.arange(STEPS))
            return params, state._replace(monitor=None), losses

        return train

    def batches(self):
        return self.x, self.y, self.w


def by_pmap(train, *batches):
    """What each replica ends with."""
    parts = [np.stack(np.split(b, 2, axis=1)) for b in batches]
    return jax.pmap(train, axis_name="batch", devices=DEVICES)(*parts)


def by_shard_map(train, *batches, check_vma):
    """The same; where JAX checks that the replicas are equal, the result has only one."""
    replicas = PartitionSpec() if check_vma else PartitionSpec("batch")

    def one(*own):
        out = train(*own)
        return out if check_vma else jax.tree.map(lambda x: x[None], out)

    out = jax.jit(
        jax.shard_map(
            one,
            mesh=MESH,
            in_specs=PartitionSpec(None, "batch"),
            out_specs=replicas,
            check_vma=check_vma,
        )
    )(*batches)
    return jax.tree.map(lambda x: jnp.stack([x, x]), out) if check_vma else out


def by_shard_map_checked(train, *batches):
    return by_shard_map(train, *batches, check_vma=True)


def by_shard_map_unchecked(train, *batches):
    return by_shard_map(train, *batches, check_vma=False)


WAYS = {
    "pmap": by_pmap,
    "checked": by_shard_map_checked,
    "unchecked": by_shard_map_unchecked,
}


def difference(a, b):
    own = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(initial=0), a, b)
    return max(jax.tree.leaves(own))


def replica(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def assert_same(both, alone=None):
    """Replicas are equal, and equal to one device with the whole batch."""
    first, second = replica(both, 0), replica(both, 1)
    assert np.isfinite(difference(first, first))
    apart = difference(first, second)
    assert apart < 1e-6, apart
    if alone is not None:
        apart = difference(first, alone)
        assert apart < 1e-4, apart
    return apart


def agree(name, way):
    """Fifty steps on two replicas are those of one device."""
    make, arguments = MEMBERS[name]
    problem = Problem(make, **arguments)
    options = {"weighted": name != "so"}
    alone = jax.block_until_ready(
        jax.jit(problem.train(problem.instrument(), **options))(*problem.batches())
    )
    both = WAYS[way](
        problem.train(problem.instrument(axis_name="batch"), **options), *problem.batches()
    )
    print(name, way, assert_same(both, alone))
