import made_runs
import numpy as np
import pytest
from matplotlib.figure import Figure

from kldwrm_jax.experiments import figures


@pytest.fixture
def saved(monkeypatch):
    """The figures that were saved."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: found.append(self))
    return found


@pytest.fixture
def groups(tmp_path):
    curves = {"K-FAC: a": [[0.1, 0.9, 0.97], [0.2, 0.8, 0.95]], "Adam: b": [[0.1, 0.5, 0.7]]}
    return {
        label: [made_runs.write(tmp_path / label[0], i, curve) for i, curve in enumerate(own)]
        for label, own in curves.items()
    }


def test_every_seed_is_a_line_of_its_setting_and_metric(groups, saved, tmp_path):
    metrics = ("test accuracy", "test loss", "train loss")
    path = tmp_path / "new" / "figure.png"
    assert figures.every_seed(path, "Title", groups, "corrected", metrics) == path
    assert path.parent.exists()
    panels = np.reshape(saved[0].axes, (3, 2))
    assert [len(panel.lines) for panel in panels[0]] == [2, 1]
    np.testing.assert_allclose(panels[0, 0].lines[1].get_ydata(), [0.21, 0.81, 0.96])
    np.testing.assert_allclose(panels[2, 1].lines[0].get_ydata(), [0.5, 0.25, 0.5 / 3])
    assert [panel.get_ylabel() for panel in panels[:, 0]] == list(metrics)
    assert [panel.get_yscale() for panel in panels[:, 0]] == ["linear", "log", "log"]


def test_the_first_epochs_do_not_set_the_scale_of_accuracies(saved, tmp_path):
    runs = [made_runs.write(tmp_path, 0, [0.1, *np.linspace(0.8, 0.9, 20)])]
    figures.every_seed(tmp_path / "a.png", "Title", {"K-FAC": runs}, "paper", ["test accuracy"])
    low, high = saved[0].axes[0].get_ylim()
    assert 0.78 < low < 0.81
    assert 0.9 < high < 0.92


def test_a_band_is_the_mean_or_median_and_the_range(saved, tmp_path):
    values = np.array([[1.0, 2.0], [2.0, 4.0], [9.0, 9.0]])
    panels = {"steps": {"Adam": ([10, 20], values)}}
    figures.bands(tmp_path / "a.png", "Title", "test loss", panels)
    figures.bands(tmp_path / "a.png", "Title", "test loss", panels, np.median)
    for figure, middle in zip(saved, (values.mean(0), [2.0, 4.0]), strict=True):
        (panel,) = figure.axes
        np.testing.assert_allclose(panel.lines[0].get_xydata(), np.transpose([[10, 20], middle]))
        extent = panel.collections[0].get_paths()[0].get_extents()
        assert (extent.y0, extent.y1) == (1, 9)
        assert panel.get_xlabel() == "steps"


def test_protocols_stand_side_by_side(groups, saved, tmp_path):
    figures.by_protocol(tmp_path / "a.png", "Title", groups, ["paper", "corrected"])
    paper, corrected = saved[0].axes
    np.testing.assert_allclose(paper.lines[0].get_ydata(), [0.15, 0.85, 0.96])
    np.testing.assert_allclose(corrected.lines[0].get_ydata(), [0.16, 0.86, 0.97])
    assert [text.get_text() for text in corrected.get_legend().get_texts()] == [
        "K-FAC: a, 2 runs",
        "Adam: b, 1 runs",
    ]


def test_curves_that_are_not_finite_are_drawn(tmp_path):
    curves = {"Adam": ([1, 2], np.array([[np.nan, np.nan]]))}
    path = figures.bands(tmp_path / "a.png", "Title", "test accuracy", {"epoch": curves})
    assert path.read_bytes().startswith(b"\x89PNG")
