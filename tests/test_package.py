"""The wheel is enough: in an empty environment, without the repository, it runs the quickstart."""

import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def command(*args, **kwargs):
    done = subprocess.run(
        [str(a) for a in args], capture_output=True, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.outside
def test_the_wheel_runs_the_readme_in_an_empty_environment(tmp_path):
    command(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "kldwrm_jax/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "docs", "notebooks"))]

    command(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    command(python, "-m", "pip", "install", "--quiet", wheel)
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "quickstart.py").write_text(block)
    printed = command(python, "quickstart.py", cwd=tmp_path)
    assert float(re.search(r"loss (\d\.\d+)", printed).group(1)) < 0.3

    # Without the extra, the command says how to get it.
    told = subprocess.run(
        [tmp_path / "env" / "bin" / "kldwrm", "demo"], capture_output=True, text=True, check=False
    )
    assert told.returncode != 0
    assert "kldwrm_jax[experiments]" in told.stderr
