import idx_files

from kldwrm_jax.experiments import cli, runs
from kldwrm_jax.experiments.table import PAPER_SETTINGS
from kldwrm_jax.experiments.training import Spec


def test_what_is_missing_is_trained_then_reported(tmp_path, capsys):
    idx_files.write(tmp_path / "data", train=24, test=16, side=28)
    out = tmp_path / "runs"
    command = [
        "paper", "--data-dir", str(tmp_path / "data"), "--batch-size", "8", "--solvers", "so",
        "--table", "main", "--epochs", "1", "--out", str(out), "--seeds", "2", "--first-seed", "3",
    ]  # fmt: skip
    assert cli.main(command) == 0
    logs = [runs.log_path(out / "so-0.33", seed) for seed in (3, 4)]
    assert [run.path for run in runs.read_all(out)] == logs
    first = [log.read_text() for log in logs]
    assert "SO-KLD-WRM, seed 3" in capsys.readouterr().out
    report = (out / "report" / "report.md").read_text()
    assert "Protocol `paper`" in report
    assert "Protocol `corrected`" in report
    assert cli.main(command) == 0
    assert [log.read_text() for log in logs] == first
    assert "seed 3" not in capsys.readouterr().out


def test_the_specs_are_the_papers():
    """Batches of 512, the empirical Fisher, biases apart."""
    spec = Spec("mnist", "paper-cnn", PAPER_SETTINGS[0].setting, 50)
    assert (spec.batch_size, spec.fisher, spec.bias) == (512, "empirical", "separate")
