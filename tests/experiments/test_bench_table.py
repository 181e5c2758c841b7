import itertools
import json
import pathlib

import pytest

from kldwrm_jax.experiments import bench, bench_table
from kldwrm_jax.experiments.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]


def row(name, gradient, ratio):
    own = {"process_ratio": ratio, "slowest_step": 2 * ratio, "compile_ratio": 3 * ratio}
    return {"name": name, "gradient": gradient, **own}


@pytest.fixture
def results(tmp_path):
    nothing_set = row("kfac-nothing-set", "oracle", 1.5)
    rows = [row("adam", "own", 1.0), row("kfac", "oracle", 1.234), row("q", "oracle", 2.0)]
    (tmp_path / "cnn-1-core.json").write_text(json.dumps({"batch": 7, "rows": rows}))
    (tmp_path / "mlp-1-core.json").write_text(json.dumps({"batch": 8, "rows": [nothing_set]}))
    (tmp_path / "cnn-2-cores.json").write_text("{}")
    return tmp_path


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_row_for_every_network_measured_on_one_core(results):
    _, _, *rows = map(cells, bench_table.table(results).splitlines())
    assert rows == [
        ["MLP 784-512-512-10, batch 8", "1.50", "-", "-", "3.0", "-", "4.5", "-"],
        ["CNN, three strided convolutions, batch 7", "-", "1.23", "2.00", "-", "2.5", "-", "3.7"],
    ]


def test_the_default_has_the_first_column_and_what_was_not_measured_has_none(results):
    heads, *_ = map(cells, bench_table.table(results).splitlines())
    assert heads == [
        "",
        "K-FAC, nothing set",
        "K-FAC",
        "Q",
        "slowest step, nothing set",
        "slowest step",
        "first call, nothing set",
        "first call",
    ]


def test_a_benchmark_measures_every_column_unless_told_otherwise():
    default = bench.Bench()
    cases = set(itertools.product(default.optimizers, default.gradients))
    assert {case for case, *_ in bench_table.COLUMNS.values()} <= cases


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
