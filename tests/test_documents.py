"""Every code block in the README and in the guide runs as printed, those of a page in its order."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
}


def _the_calibration_page(names, printed):
    """The blocks underestimate the divergence 3 to 4 times "in the example below"."""
    return 3 < 1 / names["report"].blocks_ratio < 4


def _the_recipes(names, printed):
    """Each has learned what its data has to teach."""
    losses = dict(re.findall(r"(\w+)'s shape: (\d+\.\d+)", printed))
    return all(float(losses[name]) < most for name, most in RECIPES.items())


RECIPES = {"MNIST": 0.1, "VAE": 44.0, "model": 0.45, "ResNet": 0.6}  # nats per example or token
CLAIMS = {"docs/calibration.md": _the_calibration_page, "docs/recipes.md": _the_recipes}


def run(page):
    names = {"__name__": "__main__"}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [p for p, blocks in PAGES.items() if blocks and "/" in p])
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(page)
    assert CLAIMS.get(page, lambda *_: True)(names, capsys.readouterr().out)


def test_the_readme_runs_and_trains(capsys):
    run("README.md")
    printed = capsys.readouterr().out
    assert "total" in printed
    assert float(re.search(r"loss (\d\.\d+)", printed).group(1)) < 0.3


def test_links_to_files_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
