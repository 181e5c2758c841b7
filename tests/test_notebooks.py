"""Every notebook runs from clean in its fast mode, and is committed with a full run's outputs."""

import pathlib
import re

import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.outside
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_clean(path, monkeypatch, tmp_path):
    from nbclient import NotebookClient

    monkeypatch.setenv("KLDWRM_FAST", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": FOLDER}}).execute()
    assert all(cell.execution_count for cell in code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_badge_install_cell_and_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert f"blob/main/notebooks/{path.name}" in notebook.cells[0].source
    install = next(cell for cell in code_cells(notebook) if "%pip install" in cell.source)
    assert "google.colab" in install.source
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )


@pytest.mark.parametrize(
    ("name", "pattern", "good"),
    [
        ("01_quickstart", r"test accuracy (\S+)%", lambda accuracy: accuracy > 97),
        ("02_composing", r"loss (\S+)", lambda loss: loss < 0.55),  # 0.5 is the least possible
        ("08_nothing_set", r"nothing set +loss +([\d.]+);", lambda loss: loss < 15),
    ],
)
def test_the_runs_of_a_notebook_train_well(name, pattern, good):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    found = re.findall(pattern, "".join(output.get("text", "") for output in outputs))
    assert found
    assert all(good(float(value)) for value in found), found
