"""Where layers stand: shared, nested, lifted, compiled, hidden. Against networks written out."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import precision
import pytest
from capture.references import (
    Tape,
    assert_factors,
    factors,
    gaussian_root,
    initialised,
    kfac,
)

import kldwrm_jax as kw

pytestmark = pytest.mark.usefixtures("x64")

WIDTH = 3
X = np.random.default_rng(0).normal(size=(4, WIDTH))
ROOT = gaussian_root(np.zeros((4, WIDTH)))


def instrumented(model, *args, likelihood=None, **kwargs):
    args = args or (X,)
    return kw.instrument(
        model, likelihood or kw.Gaussian(), *args, fisher="exact", uncovered="error", **kwargs
    )


def slices(params, index):
    return jax.tree.map(lambda leaf: leaf[index], params)


def stacked(expected, count, name):
    """``name0``, ``name1``, ... as one layer's stacked factors."""
    each = [expected[f"{name}{i}"] for i in range(count)]
    return tuple(jnp.stack([one[side] for one in each]) for side in (0, 1))


class Block(nn.Module):
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(self.width, name="dense")(x))


class Step(nn.Module):
    """A block as ``nn.scan`` wants it."""

    remat: bool = False

    @nn.compact
    def __call__(self, x, _):
        block = nn.remat(Block) if self.remat else Block
        return block(name="block")(x), None


def deep(tape, layers, x):
    for i, layer in enumerate(layers):
        x = jnp.tanh(tape.dense(f"layer{i}", x, layer))
    return x


# --- Sharing and nesting --------------------------------------------------------------------------


def test_a_layer_called_several_times_has_the_statistics_of_all_calls():
    class Shared(nn.Module):
        def setup(self):
            self.layer = nn.Dense(WIDTH)

        def __call__(self, x):
            return self.layer(
                jnp.tanh(self.layer(inputs=x)) + self.layer(2 * x[:, None]).sum(axis=1)
            )

    params = initialised(Shared(), X)

    def network(tape):
        def layer(x):
            return tape.dense("layer", x, params["layer"])

        return layer(jnp.tanh(layer(X)) + layer(2 * X[:, None]).sum(axis=1))

    assert_factors(factors(instrumented(Shared()), params, X), kfac(network, ROOT))


def test_setup_and_compact_name_the_same_layers():
    class Compact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(Block(name="body")(x))

    class Setup(nn.Module):
        def setup(self):
            self.body = Block()
            self.head = nn.Dense(2)

        def __call__(self, x):
            return self.head(self.body(x))

    params = initialised(Compact(), X)
    made = [factors(instrumented(model), params, X) for model in (Compact(), Setup())]
    assert_factors(*made, rtol=0)
    expected = kfac(
        lambda tape: tape.dense(
            "head",
            jnp.tanh(tape.dense("body/dense", X, params["body"]["dense"])),
            params["head"],
        ),
        ROOT[:2, :, :2],
    )
    assert_factors(made[0], expected)


def test_a_bare_layer_is_called_root():
    params = initialised(nn.Dense(WIDTH), X)
    net = instrumented(nn.Dense(WIDTH))
    assert [block.name for block in net.layers] == ["root"]
    assert_factors(factors(net, params, X), kfac(lambda tape: tape.dense("root", X, params), ROOT))


def test_a_bare_normalisation_is_observed_once():
    params = initialised(nn.LayerNorm(), X)
    net = instrumented(nn.LayerNorm())
    got = factors(net, params, X)
    jacobian = jax.vmap(
        jax.jacrev(lambda p, x: nn.LayerNorm().apply({"params": p}, x)), in_axes=(None, 0)
    )(params, X)
    expected = jax.tree.map(lambda j: (j**2).sum(axis=(0, 1)) / len(X), jacobian)
    assert_factors(got, expected)


def test_a_subclass_that_calls_its_parent_is_its_parent():
    class Scaled(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return super().__call__(2 * x)

    params = initialised(Scaled(WIDTH), X)
    expected = kfac(lambda tape: tape.dense("root", 2 * X, params), ROOT)
    assert_factors(factors(instrumented(Scaled(WIDTH)), params, X), expected)


# --- Lifted transforms ----------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "scan of remat"])
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_scanned_layers_equal_the_unrolled_network(axis, remat):
    length = WIDTH  # lengths that coincide tell nothing about the axis
    scanned = nn.scan(
        Step, variable_axes={"params": axis}, split_rngs={"params": True}, length=length
    )
    model = scanned(remat=remat, name="scan")
    params = initialised(model, X, None)
    dense = params["block"]["dense"]
    layers = [{k: jnp.take(v, i, axis=axis) for k, v in dense.items()} for i in range(length)]
    expected = kfac(lambda tape: deep(tape, layers, X), ROOT)
    net = instrumented(model, X, None, output=lambda out: out[0])
    got = factors(net, params, X, None)
    assert_factors(got, {"block/dense": stacked(expected, length, "layer")})
    assert net.layers["block/dense"].shapes == ((3, 4, 4), (3, 3, 3))
    # The block reads its parameters slice by slice, as the network does.
    matrices = net.layers["block/dense"].gather(
        {f"block/dense/{name}": leaf for name, leaf in dense.items()}
    )
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(matrices[i], jnp.vstack([layer["kernel"], layer["bias"]]))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scanned_norms_are_stacked_like_their_parameters(axis):
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.LayerNorm(name="norm")(x)), None

    scanned = nn.scan(Norm, variable_axes={"params": axis}, split_rngs={"params": True}, length=3)
    params = initialised(scanned(), X, None)
    net = instrumented(scanned(), X, None, output=lambda out: out[0])
    got = factors(net, params, X, None)

    def single(norm, x):
        for i in range(3):
            own = {k: jnp.take(v, i, axis=axis) for k, v in norm.items()}
            x = jnp.tanh(nn.LayerNorm().apply({"params": own}, x))
        return x

    jacobians = jax.jit(jax.vmap(jax.jacrev(single), in_axes=(None, 0)))(params["norm"], X)
    expected = {f"norm/{name}": (j**2).sum(axis=(0, 1)) / len(X) for name, j in jacobians.items()}
    assert_factors(got, expected)


def test_nested_scans_stack_twice():
    inner = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return inner(name="inner")(x, None)[0], None

    model = nn.scan(Outer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    params = initialised(model, X, None)
    dense = params["inner"]["block"]["dense"]
    layers = [slices(dense, (i, j)) for i in range(2) for j in range(3)]
    expected = kfac(lambda tape: deep(tape, layers, X), ROOT)
    got = factors(instrumented(model, X, None, output=lambda out: out[0]), params, X, None)
    a, g = stacked(expected, 6, "layer")
    assert_factors(got, {"inner/block/dense": (a.reshape(2, 3, 4, 4), g.reshape(2, 3, 3, 3))})


def test_a_scan_over_time_shares_its_parameters():
    x = np.random.default_rng(1).normal(size=(4, 2, WIDTH))

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            return jnp.tanh(nn.Dense(WIDTH, name="dense")(h + x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            over_time = nn.scan(
                Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1
            )
            return over_time(name="cell")(jnp.zeros_like(x[:, 0]), x)[0]

    params = initialised(Model(), x)

    def network(tape):
        h = jnp.zeros((4, WIDTH))
        for t in range(2):
            h = jnp.tanh(tape.dense("cell/dense", h + x[:, t], params["cell"]["dense"]))
        return h

    assert_factors(factors(instrumented(Model(), x), params, x), kfac(network, ROOT))


def test_ensembles_have_a_block_for_each_member():
    class Ensemble(nn.Module):
        @nn.compact
        def __call__(self, x):
            members = nn.vmap(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=2,
            )
            return members(name="members")(x).mean(axis=0)

    params = initialised(Ensemble(), X)
    dense = params["members"]["dense"]

    def network(tape):
        each = [jnp.tanh(tape.dense(f"layer{i}", X, slices(dense, i))) for i in range(2)]
        return sum(each) / 2

    expected = {"members/dense": stacked(kfac(network, ROOT), 2, "layer")}
    weights = jnp.array([1.0, 0, 2, 1])
    net = instrumented(Ensemble())
    assert_factors(factors(net, params, X), expected)
    weighted = {"members/dense": stacked(kfac(network, ROOT, weights=weights), 2, "layer")}
    assert_factors(factors(net, params, X, weights=weights), weighted)


@pytest.mark.parametrize("shape", [(4, WIDTH), (4, 2, WIDTH)])
def test_a_vmap_over_examples_equals_the_batched_model(shape):
    x = np.random.default_rng(1).normal(size=shape)

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            over_batch = nn.vmap(
                Block, variable_axes={"params": None}, split_rngs={"params": False}
            )
            return over_batch(name="block")(x)

    params = initialised(Mapped(), x)
    expected = kfac(
        lambda tape: jnp.tanh(tape.dense("block/dense", x, params["block"]["dense"])),
        gaussian_root(np.zeros(shape)),
    )
    assert_factors(factors(instrumented(Mapped(), x), params, x), expected)


def test_an_input_that_a_vmap_does_not_map_is_averaged_all_the_same():
    class Shifted(nn.Module):
        @nn.compact
        def __call__(self, x, shared):
            return x * nn.Dense(WIDTH, name="dense")(shared)

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            over_batch = nn.vmap(
                Shifted,
                variable_axes={"params": None},
                split_rngs={"params": False},
                in_axes=(0, None),
            )
            return over_batch(name="block")(x, jnp.arange(3.0))

    params = initialised(Mapped(), X)

    def network(tape):
        shared = jnp.broadcast_to(jnp.arange(3.0), X.shape)
        return X * tape.dense("block/dense", shared, params["block"]["dense"])

    got = factors(instrumented(Mapped()), params, X)["block/dense"]
    a, g = kfac(network, ROOT)["block/dense"]
    np.testing.assert_allclose(got[0], a, rtol=1e-9)
    # The layer itself is called once, with the sum of the examples' gradients.
    assert got[1].shape == g.shape
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    "wrap",
    [nn.remat, nn.jit, lambda cls: nn.jit(nn.remat(cls))],
    ids=["remat", "jit", "jit of remat"],
)
@pytest.mark.parametrize("cls", [nn.Dense, Block], ids=["layer", "module"])
def test_rematerialised_and_compiled_modules(wrap, cls):
    wrapped = wrap(cls)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrapped(WIDTH, name="last")(wrapped(WIDTH, name="first")(x))

    params = initialised(Model(), X)
    name = "" if cls is nn.Dense else "/dense"

    def layer(tape, part, x):
        own = params[part] if cls is nn.Dense else params[part]["dense"]
        z = tape.dense(part + name, x, own)
        return z if cls is nn.Dense else jnp.tanh(z)

    expected = kfac(lambda tape: layer(tape, "last", layer(tape, "first", X)), ROOT)
    net = instrumented(Model())
    oracle = net.oracle(params, X)
    for _ in range(2):  # the second time with a warm cache
        assert_factors(jax.jit(lambda o: o.factors())(oracle), expected)
    assert instrumented(Model()).layers == net.layers


def test_compiled_modules_do_not_mix_up_instrumented_models():
    x = np.random.default_rng(1).normal(size=(4, 2, WIDTH))
    compiled = nn.jit(Block)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return compiled(name="block")(x).sum(axis=1)

    params = initialised(Model(), x)

    def network(tape):
        return jnp.tanh(tape.dense("block/dense", x, params["block"]["dense"])).sum(axis=1)

    for sharing in ("expand", "reduce", "expand"):
        net = instrumented(Model(), x, sharing=sharing)
        expected = kfac(network, ROOT, reduce=sharing == "reduce")
        assert_factors(factors(net, params, x), expected)


# --- Parameters that no rule covers ---------------------------------------------------------------


class Gain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("gain", nn.initializers.ones, (x.shape[-1],))


@pytest.mark.parametrize("wrapper", ["WeightNorm", "SpectralNorm"])
def test_reparametrised_layers_are_named(wrapper):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            if wrapper == "WeightNorm":
                return nn.WeightNorm(nn.Dense(2, name="dense"))(x)
            return nn.SpectralNorm(nn.Dense(2, name="dense"))(x, update_stats=False)

    net = kw.instrument(Model(), kw.Gaussian(), X)
    variables = jax.eval_shape(Model().init, jax.random.key(0), X)
    assert wrapper in net.layers["dense/kernel"].note
    assert sum(b.size for b in net.layers) == sum(
        leaf.size for leaf in jax.tree.leaves(variables["params"])
    )


# --- Modes, dtypes, outputs -----------------------------------------------------------------------


class Batchwise(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(WIDTH, name="first")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(2, name="last")(jnp.tanh(x))


def batchwise(x=X):
    variables = Batchwise().init(jax.random.key(0), x, train=True)
    stats = {"mean": jnp.array([0.1, 0.2, 0.3]), "var": jnp.array([0.5, 1.0, 2.0])}
    return initialised(Batchwise(), x, train=True), {"batch_stats": {"norm": stats}}, variables


def test_batchnorm_in_training_mode_refuses_exact_and_says_why():
    params, others, _ = batchwise()
    net = kw.instrument(Batchwise(), kw.Gaussian(), X, train=True, fisher="exact")
    oracle = net.oracle(params, X, train=True, variables=others)
    for _ in range(2):
        with pytest.raises(ValueError, match="'norm', which normalises over the batch"):
            oracle.factors()
    factors(net, params, X, train=False, variables=others)


def test_batchnorm_in_a_compiled_module_refuses_exact_again():
    params, others, _ = batchwise()
    compiled = nn.jit(Batchwise, static_argnums=2)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return compiled(name="inner")(x, True)

    net = kw.instrument(Model(), kw.Gaussian(), X, fisher="exact")
    others = {"batch_stats": {"inner": others["batch_stats"]}}
    oracle = net.oracle({"inner": params}, X, variables=others)
    for _ in range(2):
        with pytest.raises(ValueError, match="'inner/norm', which normalises over the batch"):
            oracle.factors()


def test_batchnorm_in_training_mode_with_the_datas_labels():
    params, others, _ = batchwise()
    targets = np.random.default_rng(5).normal(size=(4, 2))
    net = kw.instrument(Batchwise(), kw.Gaussian(), X, train=True, fisher="empirical")
    got = factors(net, params, X, targets=targets, train=True, variables=others)

    def network(tape):
        z = tape.dense("first", X, params["first"])
        hat = (z - z.mean(axis=0)) / jnp.sqrt(z.var(axis=0) + 1e-5)
        z = tape("norm", hat, hat * params["norm"]["scale"] + params["norm"]["bias"])
        return tape.dense("last", jnp.tanh(z), params["last"])

    tape = Tape()
    residual = (network(tape) - targets)[None]
    expected = kfac(network, residual, together=True)
    shifts = {"norm#0": jnp.zeros_like(X)}
    per_row = jax.grad(lambda s: (network(Tape(s)) * residual[0]).sum() / np.sqrt(4))(shifts)
    g, hat = per_row["norm#0"], tape.inputs["norm#0"]
    expected.pop("norm")
    expected |= {"norm/scale": ((g * hat) ** 2).sum(axis=0), "norm/bias": (g**2).sum(axis=0)}
    assert_factors(got, expected, rtol=1e-6)


def test_updates_of_other_collections_are_dropped():
    params, others, _ = batchwise()
    net = kw.instrument(Batchwise(), kw.Gaussian(), X, train=True)
    oracle = net.oracle(params, X, train=True, variables=others, key=jax.random.key(0))
    first, second = oracle.outputs(params), oracle.outputs(params)
    np.testing.assert_array_equal(first, second)
    plain = Batchwise().apply({"params": params, **others}, X, train=True, mutable=["batch_stats"])[
        0
    ]
    np.testing.assert_allclose(first, plain, rtol=1e-12)


def test_dropout_masks_are_those_of_the_given_key():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.Dropout(0.5, deterministic=not train, name="drop")(x)
            return nn.Dense(2, name="dense")(x)

    params = initialised(Model(), X)
    net = instrumented(Model(), X, train=True)
    key = jax.random.key(3)
    got = factors(net, params, X, train=True, rngs={"dropout": key})

    class Masks(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False, name="drop")(x)

    dropped = Masks().apply({}, X, rngs={"dropout": key})
    assert (dropped == 0).any()
    expected = kfac(lambda tape: tape.dense("dense", dropped, params["dense"]), ROOT[:2, :, :2])
    assert_factors(got, expected)


class Mixed(nn.Module):
    """One layer of each kind, with a compute dtype."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 8, dtype=self.dtype)(tokens)
        x = nn.Conv(8, (3,), dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(x)
        x = nn.DenseGeneral((2, 4), dtype=self.dtype)(x)
        x = nn.Einsum((2, 4, 6), "bthd,hdf->btf", dtype=self.dtype)(x)
        return nn.Dense(5, dtype=self.dtype)(jnp.tanh(x))


def test_bfloat16_compute_changes_no_layers_treatment():
    with precision.x64(False):
        tokens = np.random.default_rng(0).integers(0, 7, (4, 5))
        params = initialised(Mixed(), tokens)
        nets = [
            kw.instrument(Mixed(dtype), kw.Categorical(), tokens, fisher="empirical")
            for dtype in (None, jnp.bfloat16)
        ]
        assert nets[0].layers == nets[1].layers
        full, half = (factors(net, params, tokens, targets=tokens % 5) for net in nets)
    for name, expected in full.items():
        for x, y in zip(jax.tree.leaves(half[name]), jax.tree.leaves(expected), strict=True):
            assert x.dtype == jnp.float32
            assert np.linalg.norm(x - y) < 0.05 * np.linalg.norm(y), name


def test_bfloat16_parameters_give_float32_factors():
    with precision.x64(False):
        model = nn.Sequential([nn.Dense(4, param_dtype=jnp.bfloat16), Gain(), nn.LayerNorm()])
        params = jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16), initialised(model, X.astype(np.float32))
        )
        net = kw.instrument(model, kw.Gaussian(), X.astype(np.float32), fisher="exact")
        got = factors(net, params, X.astype(np.float32))
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_boxed_parameters(box):
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = box(nn.initializers.lecun_normal(), (None, "model"))
            return Gain(name="gain")(nn.Dense(WIDTH, kernel_init=init, name="dense")(x))

    variables = Boxed().init(jax.random.key(0), X)
    net = kw.instrument(Boxed(), kw.Gaussian(), X, fisher="exact")
    assert {p for block in net.layers for p in [q.path for q in block.parameters]} == {
        "dense/kernel",
        "dense/bias",
        "gain/gain",
    }
    boxed = factors(net, variables["params"], X)
    plain = factors(net, nn.unbox(variables["params"]), X)
    assert_factors(boxed, plain, rtol=0)


class TaggedBlock(nn.Module):
    """A Dense layer that is written out and tagged."""

    read: Any = None

    @nn.compact
    def __call__(self, x):
        w = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], WIDTH), float)
        b = self.param("bias", nn.initializers.ones, (WIDTH,), float)
        return jnp.tanh(kw.tag(self.read(w) if self.read else w, x, x @ w + b, bias=b))


class TaggedStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.remat(TaggedBlock)(name="dense")(x), None


def test_a_tag_inside_a_module_makes_the_block_of_a_dense():
    params = initialised(nn.Dense(WIDTH), X)
    expected = factors(
        instrumented(nn.Sequential([nn.Dense(WIDTH), jnp.tanh])), {"layers_0": params}, X
    )
    net = instrumented(nn.Sequential([TaggedBlock()]))
    got = factors(net, {"layers_0": params}, X)
    assert_factors(got, expected)


def test_tags_under_a_scan_over_modules_are_stacked():
    def deep(step):
        scanned = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scanned()

    class PlainStep(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH, name="dense")(x)), None

    first = {"output": lambda out: out[0]}
    params = initialised(deep(PlainStep), X, None)
    expected = factors(instrumented(deep(PlainStep), X, None, **first), params, X, None)
    got = factors(instrumented(deep(TaggedStep), X, None, **first), params, X, None)
    assert_factors(got, expected)


def test_a_tag_of_something_else_is_an_error_with_the_way_out():
    with pytest.raises(ValueError, match=r"In a Linen module the leaf is what self\.param returns"):
        instrumented(TaggedBlock(jnp.transpose))
