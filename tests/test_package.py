"""Version and addresses have one source each, and what is released is enough to run and to test."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import kldwrm_jax as kw

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
# What may link to the repository: not the tests, nor what a build or a run leaves behind.
LINKING = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff")),
    *(path for path in (ROOT / "docs").iterdir() if path.suffix in {".md", ".py"}),
    *(ROOT / "notebooks").glob("*.ipynb"),
    *(ROOT / "kldwrm_jax").rglob("*.py"),
]


def test_documents_tell_the_version():
    assert f"\nversion: {kw.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest, *_ = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == kw.__version__


def test_all_links_lead_to_the_one_repository():
    name = PROJECT["name"]
    assert all(url.startswith(REPOSITORY) for url in PROJECT["urls"].values())
    links = [
        link
        for page in LINKING
        for link in re.findall(rf"https://[\w./-]*/{name}\b", page.read_text())
    ]
    path = REPOSITORY.removeprefix("https://github.com")
    colab = f"https://colab.research.google.com/github{path}"
    assert {*links} == {REPOSITORY, colab}


def lower_bounds():
    return dict(requirement.split(">=") for requirement in PROJECT["dependencies"])


def test_the_page_on_stability_has_the_lower_bounds():
    page = (ROOT / "docs" / "stability.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", page, re.MULTILINE))
    bounds = lower_bounds()
    assert bounds["jax"] == bounds["jaxlib"]
    assert rows == {
        "Python": PROJECT["requires-python"].removeprefix(">="),
        **{name: bounds[name.lower()] for name in ("JAX", "Flax", "Optax")},
    }


def test_python_versions_are_the_same_everywhere():
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert re.findall(r"3\.\d+", matrix) == classifiers
    assert f">={classifiers[0]}" == PROJECT["requires-python"]
    assert f"| {classifiers[-1]} |" in (ROOT / "docs" / "stability.md").read_text()


def test_workflows_and_ci_call_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    runs = re.findall(r"- run: (.*)", workflow)
    assert all(run.startswith("make ") for run in runs)
    (matrix,) = re.findall(r"target: \[(.*)\]", workflow)
    called = {run.removeprefix("make ") for run in runs} - {"${{ matrix.target }}"}
    called |= set(matrix.split(", "))
    called |= set(re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    assert called <= targets


def test_the_reference_has_every_public_name_and_no_other_module():
    page = (ROOT / "docs" / "api.md").read_text()
    modules = {name for name in kw.__all__ if isinstance(getattr(kw, name), type(kw))}
    named = set(re.findall(r"auto(?:function|class):: (\w+)$", page, re.MULTILINE))
    assert named == set(kw.__all__) - modules
    assert set(re.findall(r"automodule:: kldwrm_jax\.(\S+)", page)) == modules


# --- What is released -----------------------------------------------------------------------------


def command(*args, **kwargs):
    done = subprocess.run(
        [str(a) for a in args], capture_output=True, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The files that `make release` has built, or others made of the checkout."""
    if "KLDWRM_DIST" in os.environ:
        return ROOT / os.environ["KLDWRM_DIST"]
    folder = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


def environment(folder, *requirements):
    """Python of a new environment with nothing but these."""
    command(sys.executable, "-m", "venv", folder)
    command(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements)
    return folder / "bin" / "python"


def isolated(folder):
    """How a program is run that must not see this checkout."""
    return {
        "cwd": folder,
        "env": {key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    }


def runs_the_quickstart(python, folder):
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "quickstart.py").write_text(block)
    printed = command(python, "quickstart.py", **isolated(folder))
    return float(re.search(r"loss (\d\.\d+)", printed).group(1)) < 0.3


@pytest.mark.outside
def test_the_wheel_runs_the_readme_in_an_empty_environment(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    assert f"-{kw.__version__}-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "kldwrm_jax/py.typed" in names
    info = f"kldwrm_jax-{kw.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"kldwrm_jax", info}

    python = environment(tmp_path / "env", wheel)
    assert runs_the_quickstart(python, tmp_path)
    # Without the extra, the command says how to get it.
    told = subprocess.run(
        [python.parent / "kldwrm", "demo"], capture_output=True, text=True, check=False
    )
    assert told.returncode != 0
    assert "kldwrm_jax[experiments]" in told.stderr


@pytest.mark.outside
def test_the_sdist_installs_and_tests_itself(dist, tmp_path):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("kldwrm_jax-*")
    files = {path.name for path in folder.iterdir()}
    assert files >= {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile"}
    assert files >= {"tests", "docs", "notebooks", "examples", "results"}

    python = environment(tmp_path / "env", f"{folder}[test]")
    assert runs_the_quickstart(python, tmp_path)
    tested = ["tests/test_paths.py", "tests/test_package.py"]
    command(python, "-m", "pytest", "-m", "not outside", *tested, **isolated(folder))


@pytest.mark.outside
def test_the_documentation_loads_no_script_from_elsewhere(tmp_path):
    command(sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ROOT / "docs", tmp_path)
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="https?:', page.read_text()), page
    assert (tmp_path / "_static" / "mathjax" / "tex-chtml.js").exists()
