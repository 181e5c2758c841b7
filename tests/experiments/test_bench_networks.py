import jax

from kldwrm_jax.experiments.bench_networks import NETWORKS


def test_the_networks_are_those_of_the_published_tables():
    sizes = {}
    for name, (_, model, batch, _) in NETWORKS.items():
        shapes = jax.eval_shape(model.init, jax.random.key(0), batch(2)[0])["params"]
        sizes[name] = sum(x.size for x in jax.tree.leaves(shapes))
    assert sizes["mlp"] == 785 * 512 + 513 * 512 + 513 * 10
    assert sizes["paper-cnn"] == 4712
    strided = 10 * 24 + (9 * 24 + 1) * 32 + (9 * 32 + 1) * 48
    assert sizes["cnn"] == strided + (4 * 4 * 48 + 1) * 80 + 81 * 10
    for width in (96, 256):
        layer = 12 * width**2 + 13 * width  # attention, hidden layer, two norms
        ends = 64 * width + 2 * width + (width + 1) * 64
        assert sizes[f"decoder-{width}"] == 2 * layer + ends


def test_labels_belong_to_the_outputs():
    for _, model, batch, _ in NETWORKS.values():
        x, y = batch(2)
        logits, _ = jax.eval_shape(
            lambda x, model=model: model.init_with_output(jax.random.key(0), x), x
        )
        assert logits.shape[:-1] == y.shape
        assert int(y.max()) < logits.shape[-1]


def test_the_resnet_normalises_by_the_batch():
    _, model, batch, _ = NETWORKS["resnet"]
    variables = jax.eval_shape(model.init, jax.random.key(0), batch(2)[0])
    assert variables["batch_stats"]
