import json
import pathlib

import pytest

from kldwrm_jax.experiments import bench_table
from kldwrm_jax.experiments.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]


def row(name, gradient, ratio):
    own = {"process_ratio": ratio, "slowest_step": 2 * ratio, "compile_ratio": 3 * ratio}
    return {"name": name, "gradient": gradient, **own}


@pytest.fixture
def results(tmp_path):
    rows = [row("adam", "own", 1.0), row("kfac", "oracle", 1.234), row("q", "oracle", 2.0)]
    (tmp_path / "cnn-1-core.json").write_text(json.dumps({"batch": 7, "rows": rows}))
    (tmp_path / "cnn-2-cores.json").write_text("{}")
    return tmp_path


def test_the_table_has_a_row_for_every_network_measured_on_one_core(results):
    _, _, *rows = bench_table.table(results).splitlines()
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[0] == "CNN, three strided convolutions, batch 7"
    assert cells[1:] == ["1.23", "-", "2.00", "-", "-", "2.5", "-", "3.7"]


def test_only_what_is_between_the_marks_is_rewritten(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench_table.BEGIN}\nold\n{bench_table.END}\nafter\n")
    bench_table.rewrite(page, results)
    made = f"{bench_table.BEGIN}\n{bench_table.table(results)}\n{bench_table.END}"
    assert page.read_text() == f"before\n{made}\nafter\n"


def test_a_document_without_marks_is_an_error_and_stays(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(UsageError, match="has no lines"):
        bench_table.rewrite(page, results)
    assert page.read_text() == "nothing\n"


@pytest.mark.parametrize("document", ["README.md", "docs/cost.md"])
def test_the_published_tables_are_those_of_the_results(document):
    assert bench_table.table(ROOT / "results" / "bench") in (ROOT / document).read_text()
