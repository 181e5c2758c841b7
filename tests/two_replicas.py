"""What holds on two replicas: ``python two_replicas.py CHECK`` runs one check in this process.

A process has the devices it was started with: ``test_axis_name.py`` starts one for each group.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

# Two of eight: XLA has a thread for each, of which a collective holds as many as it joins.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)  # so that what differs, differs

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

import kldwrm_jax as kw  # noqa: E402

BATCH, CLASSES, STEPS = 16, 3, 50
MEMBERS = {
    "nothing set": (kw.kfac, {"learning_rate": None}),
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
        self.x = rng.normal(size=(5, BATCH, 6))
        self.y = self.x[..., :CLASSES].argmax(axis=-1)
        self.w = rng.uniform(size=(5, BATCH)) * (rng.uniform(size=(5, BATCH)) > 0.2)
        self.model = model or Net()
        self.params = self.model.init(jax.random.key(2), self.x[0])["params"]
        self.options = {"fisher": fisher}
        arguments = {"learning_rate": 0.1} | arguments
        self.tx = make(self.instrument().layers, refresh_every=3, **arguments)

    def instrument(self, **options):
        return kw.instrument(self.model, kw.Categorical(), self.x[0], **self.options | options)

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
    own = jax.tree.map(lambda x, y: np.abs(np.asarray(x, float) - y).max(initial=0), a, b)
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


def agree(name):
    """Fifty steps on two replicas are those of one device."""
    make, arguments = MEMBERS[name]
    problem = Problem(make, **arguments)
    options = {"weighted": name != "so"}
    alone = jax.jit(problem.train(problem.instrument(), **options))(*problem.batches())
    net = problem.instrument(axis_name="batch")
    for way in WAYS.values():
        assert_same(way(problem.train(net, **options), *problem.batches()), alone)


def gradients(name):
    """That of ``oracle.loss`` is the whole batch's; the user's own pmean changes nothing."""
    problem = Problem(kw.kfac)
    alone = jax.jit(problem.train(problem.instrument(), "loss"))(*problem.batches())
    net = problem.instrument(axis_name="batch")
    for own in ("loss", "pmean"):
        assert_same(WAYS[name](problem.train(net, own), *problem.batches()), alone)


def micro_batches(name):
    """Each replica goes through its part in parts; a step's true size is measured on one."""
    problem = Problem(kw.kfac, "exact", true_kl_clip=None)
    alone = jax.jit(problem.train(problem.instrument(), weighted=True))(*problem.batches())
    train = problem.train(problem.instrument(axis_name="batch"), weighted=True, micro_batches=4)
    assert_same(WAYS[name](train, *problem.batches()), alone)


def sampled(name):
    """Replicas that draw labels and signs of their own stay the same, and learn."""
    problem = Problem(kw.kfac, "sampled", Net(uncovered=True))
    train = problem.train(problem.instrument(axis_name="batch"), "pmean")
    both = WAYS[name](train, *problem.batches())
    assert_same(both)
    losses = both[2][0]
    assert losses[-5:].mean() < 0.7 * losses[:5].mean(), losses


class Block(nn.Module):
    """A residual block; its normalisations see the whole batch."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x):
        def norm(x):
            return nn.BatchNorm(
                use_running_average=False, axis_name=self.axis_name, param_dtype=float
            )(x)

        def conv(x):
            return nn.Conv(3, (3, 3), use_bias=False, param_dtype=float)(x)

        return nn.relu(x + norm(conv(nn.relu(norm(conv(x))))))


class ResNet(nn.Module):
    """As Flax's ImageNet example has it, and smaller."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3, 3), param_dtype=float)(x)
        x = Block(self.axis_name)(x)
        return nn.Dense(CLASSES, param_dtype=float)(x.mean(axis=(1, 2)))


def batch_norm(name):
    """A ResNet whose BatchNorm has an axis name trains as one device does on the whole batch."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1, BATCH, 4, 4, 3)), rng.integers(0, CLASSES, (1, BATCH))
    start = jax.tree.map(lambda v: v.astype(float), ResNet().init(jax.random.key(0), x[0]))

    def training(axis_name):
        net = kw.instrument(
            ResNet(axis_name), kw.Categorical(), x[0], fisher="empirical", axis_name=axis_name
        )
        tx = kw.kfac(net.layers, 0.1, refresh_every=3)

        def train(x, y):
            def step(carried, _):
                params, stats, state = carried
                loss, grads, oracle = net.value_and_grad(
                    params, x[0], targets=y[0], variables={"batch_stats": stats}
                )
                updates, state = tx.update(grads, state, params, oracle=oracle)
                params = optax.apply_updates(params, updates)
                return (params, oracle.variables["batch_stats"], state), loss

            begin = (start["params"], start["batch_stats"], tx.init(start["params"]))
            (params, stats, _), losses = lax.scan(step, begin, None, STEPS)
            return params, stats, losses

        return train

    alone = jax.jit(training(None))(x, y)
    both = WAYS[name](training("batch"), x, y)
    assert_same(both, alone)
    losses = both[2][0]
    assert losses[-1] < 0.5 * losses[0], losses


class Residual(nn.Module):
    """Two convolutions; where shapes change, the shortcut has one of its own."""

    features: int
    stride: int
    norm: Callable
    conv: Callable

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), self.stride)(x)))
        y = self.conv(self.features, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)  # a block begins as the identity
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """In the shape of Flax's ImageNet example: a stem and four stages of two blocks."""

    width: int = 4

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name="batch"
        )
        x = nn.relu(norm()(conv(self.width, (7, 7), 2)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage and not block else 1
                x = Residual(self.width * 2**stage, stride, norm, conv)(x)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class TrainState(kw.TrainState):
    batch_stats: Any


def resnet18(_):
    """The example's own step with an oracle: a loss with a penalty, averaged by ``pmean``."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, (2, 8))
    x = rng.normal(size=(CLASSES, 16, 16, 3))[y] + rng.normal(size=(2, 8, 16, 16, 3))
    x, model = x.astype(np.float32), ResNet18()
    net = kw.instrument(model, kw.Categorical(), x[0], axis_name="batch", uncovered="error")
    assert sum(block.kind == "Conv" for block in net.layers) == 20
    state = TrainState.create(
        apply_fn=model.apply,
        tx=kw.kfac(net.layers, 0.1, refresh_every=5),
        **model.init(jax.random.key(0), x[0], train=False),
    )

    def step(state, x, y):
        variables = {"batch_stats": state.batch_stats}

        def loss_fn(params):
            logits, new = state.apply_fn({"params": params} | variables, x, mutable=["batch_stats"])
            penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss + 0.5e-4 * penalty, (loss, new["batch_stats"])

        grads, (loss, new) = jax.grad(loss_fn, has_aux=True)(state.params)
        grads, loss, new = lax.pmean((grads, loss, new), "batch")
        key = jax.random.key(state.step)
        oracle = net.oracle(state.params, x, targets=y, key=key, variables=variables)
        return state.apply_gradients(grads=grads, oracle=oracle, batch_stats=new), loss

    step = jax.pmap(step, axis_name="batch", devices=DEVICES)
    state, losses = jax.tree.map(lambda v: jnp.stack([v, v]), state), []
    for _ in range(15):
        state, loss = step(state, x, y)
        losses.append(float(loss[0]))
    assert_same((state.params, state.batch_stats))
    assert np.mean(losses[-3:]) < 0.6 * losses[0], losses


def unnamed(name):
    """Without an axis name it is an error, unless replicas are said to be independent."""
    problem = Problem(kw.kfac)
    with pytest.raises(ValueError, match=r"axis_name='batch'\) to average.* or axis_name=\(\)"):
        WAYS[name](problem.train(problem.instrument()), *problem.batches())
    if name == "checked":
        return  # replicas that differ have another type: JAX refuses them by itself
    apart = WAYS[name](problem.train(problem.instrument(axis_name=())), *problem.batches())
    assert difference(replica(apart, 0), replica(apart, 1)) > 1e-3
    if name == "pmap":
        parts = [np.stack(np.split(b, 2, axis=1)) for b in problem.batches()]
        jax.pmap(problem.train(problem.instrument()), devices=DEVICES)(*parts)


CHECKS = {
    **{f"agree {name}": (agree, name) for name in MEMBERS},
    **{
        f"{check.__name__} {way}": (check, way)
        for check in (gradients, micro_batches, sampled, batch_norm, unnamed)
        for way in WAYS
    },
    "resnet18 pmap": (resnet18, "pmap"),
}

if __name__ == "__main__":
    for check in sys.argv[1:]:
        function, argument = CHECKS[check]
        function(argument)
        print("held:", check, flush=True)
