import io

from rich.console import Console

from kldwrm_jax.experiments import progress


def draw(console):
    with progress.progress_bars(console) as bars:
        task = bars.add_task("K-FAC, seed 4", total=2, note="")
        bars.update(task, advance=2, note="test accuracy: paper 50.00%")
    return console and console.file.getvalue()


def test_bars_are_drawn_on_a_terminal_only():
    shown = draw(Console(file=io.StringIO(), force_terminal=True, width=150))
    assert "K-FAC, seed 4" in shown
    assert "2/2" in shown
    assert "paper 50.00%" in shown
    assert draw(Console(file=io.StringIO(), force_terminal=False)).strip() == ""


def test_without_a_console_nothing_is_printed(capsys):
    draw(None)
    bars = progress.progress_bars()
    bars.console.print("remark")
    assert capsys.readouterr() == ("", "")


def test_a_table_is_markdown_and_printed_as_a_table(capsys):
    text = progress.markdown(["name", "value"], [["a", "1"], ["b", "2"]])
    assert text == "| name | value |\n| --- | --- |\n| a | 1 |\n| b | 2 |"
    progress.print_markdown(f"**Title**\n\n{text}")
    shown = capsys.readouterr().out
    assert "Title" in shown
    assert "name" in shown
    assert "|" not in shown
    assert max(map(len, shown.splitlines())) <= 160
