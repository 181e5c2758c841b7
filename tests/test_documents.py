"""Every code block in the README and in the guide runs as printed, those of a page in its order."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
}


def run(page):
    names = {"__name__": "__main__"}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [p for p, blocks in PAGES.items() if blocks and "/" in p])
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(page)


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
