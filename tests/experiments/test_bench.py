import json

import pytest

from kldwrm_jax.experiments import bench, cli
from kldwrm_jax.experiments.bench_networks import Network, images
from kldwrm_jax.experiments.models import MLP


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(bench.NETWORKS, "mlp", Network("small", MLP(10, (8,)), images, 8))


@pytest.mark.usefixtures("small")
def test_a_benchmark_prints_its_table_and_saves_ratios_times_memory_and_provenance(
    tmp_path, capsys
):
    out = tmp_path / "bench"
    words = ["--networks", "mlp", "--optimizers", "kfac", "--rounds", "2", "--batch-size", "4"]
    words += ["--gradients", "value_and_grad", "oracle", "--out", str(out)]
    words += ["--fisher", "empirical"]
    assert cli.main(["bench", *words]) == 0
    printed = capsys.readouterr().out
    assert "relative to" in printed
    assert "kfac" in printed
    (path,) = out.iterdir()
    result = json.loads(path.read_text())
    cores = result["machine"]["usable_cores"]
    assert path.name in ("mlp-1-core.json", f"mlp-{cores}-cores.json")
    assert {"versions", "machine", "git_revision"} <= result.keys()
    assert {"cores", "processor"} <= result["machine"].keys()
    assert (result["batch"], result["period"], result["rounds"]) == (4, 20, 2)
    adam, sgd, kfac, own = result["rows"]
    assert [row["name"] for row in result["rows"]] == ["adam", "sgd", "kfac", "kfac"]
    assert [row["gradient"] for row in (kfac, own)] == ["value_and_grad", "oracle"]
    assert adam["ratio"] > 0  # beside other steps of itself: the noise of the machine
    assert adam["compile_ratio"] == 1
    assert kfac["compile_ratio"] == kfac["compile_seconds"] / adam["compile_seconds"]
    for row in result["rows"]:
        assert len(row["ratio_of_each_round"]) == 2
        assert row["slowest_step"] >= row["usual_step"] > 0
        assert min(row["process_ratio"], row["process_seconds"], row["compile_seconds"]) > 0
        assert row["temporary_bytes"] is None or row["temporary_bytes"] > 0
    assert kfac["state_bytes"] > adam["state_bytes"] > sgd["state_bytes"]


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("optimizers", "kfac-product"),
        ("networks", "mlp, paper-cnn"),
        ("gradients", "oracle"),
        ("fisher", "sampled"),
    ],
)
def test_an_unknown_name_gets_the_known_ones(argument, complaint, capsys, tmp_path):
    assert cli.main(["bench", f"--{argument}", "lbfgs", "--out", str(tmp_path / "bench")]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()
