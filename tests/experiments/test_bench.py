import json

import pytest

from kldwrm_jax.experiments import bench, cli
from kldwrm_jax.experiments.bench_cases import images
from kldwrm_jax.experiments.models import MLP


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(bench.NETWORKS, "mlp", (MLP(10, (8,)), images))


@pytest.mark.usefixtures("small")
def test_a_benchmark_prints_its_table_and_saves_ratios_times_memory_and_provenance(
    tmp_path, capsys
):
    out = tmp_path / "bench"
    words = ["--networks", "mlp", "--optimizers", "kfac", "--rounds", "2", "--batch-size", "4"]
    words += ["--gradients", "value_and_grad", "oracle", "--out", str(out)]
    assert cli.main(["bench", *words]) == 0
    printed = capsys.readouterr().out
    assert "relative to" in printed
    assert "kfac" in printed
    result = json.loads((out / "mlp.json").read_text())
    assert {"versions", "machine", "git_revision"} <= result.keys()
    assert {"cores", "processor"} <= result["machine"].keys()
    assert (result["batch"], result["period"], result["rounds"]) == (4, 30, 2)
    sgd, adam, kfac, own = result["rows"]
    assert [row["name"] for row in result["rows"]] == ["sgd", "adam", "kfac", "kfac"]
    assert [row["gradient"] for row in (kfac, own)] == ["value_and_grad", "oracle"]
    assert sgd["ratio"] > 0  # beside another round of itself: the noise of the machine
    assert adam["adam_ratio"] == 1
    assert kfac["adam_ratio"] == kfac["ratio"] / adam["ratio"]
    for row in result["rows"]:
        assert len(row["ratio_of_each_round"]) == 2
        assert row["slowest_step"] >= row["usual_step"] > 0
        assert min(row["process_ratio"], row["process_seconds"], row["compile_seconds"]) > 0
        assert row["temporary_bytes"] is None or row["temporary_bytes"] > 0
    assert kfac["state_bytes"] > adam["state_bytes"] > sgd["state_bytes"]


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [("optimizers", "kfac-product"), ("networks", "mlp, cnn"), ("gradients", "oracle")],
)
def test_an_unknown_name_gets_the_known_ones(argument, complaint, capsys, tmp_path):
    assert cli.main(["bench", f"--{argument}", "lbfgs", "--out", str(tmp_path / "bench")]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()
