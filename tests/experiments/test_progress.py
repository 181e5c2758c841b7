import io
import json

import pytest
from rich.console import Console

from kldwrm_jax.experiments.progress import Screen

HEADER = {"seed": 4, "setting": {"optimizer": "kfac"}}
EPOCH = {"kind": "epoch", "test": {"paper": {"accuracy": 0.5}, "corrected": {"accuracy": None}}}
END = {"kind": "end", "seconds": 1.5}


def screen(terminal):
    return Screen(Console(file=io.StringIO(), force_terminal=terminal, width=150))


def watch(shown, **kwargs):
    with shown.watching(2, **kwargs) as watcher:
        watcher.skip()
        watcher.compiling()
        watcher.start("K-FAC", 4, epochs=1, steps=2, done=0)
        watcher.step()
        watcher.step()
        watcher.epoch(HEADER, EPOCH)
        watcher.end(HEADER, END)
    return shown.console.file.getvalue()


def test_a_program_reads_json_lines_only():
    lines = [json.loads(line) for line in watch(screen(False)).splitlines()]
    assert lines == [
        {"optimizer": "kfac", "seed": 4, **EPOCH},
        {"optimizer": "kfac", "seed": 4, **END},
    ]


def test_a_program_that_wants_results_only_is_left_alone():
    assert watch(screen(False), every_epoch=False) == ""


def test_a_reader_sees_bars_and_numbers():
    text = watch(screen(True))
    assert "K-FAC, seed 4" in text
    assert "paper 50.00 %" in text
    assert "2/2" in text
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.splitlines()[0])


@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_is_formatted_for_a_reader_and_plain_for_a_program(terminal):
    shown = screen(terminal)
    shown.table("Title", [{"a": 0.12345}], {"a": ("heading", "{:.2f}".format)})
    shown.say("remark")
    text = shown.console.file.getvalue()
    if terminal:
        assert "heading" in text
        assert "0.12 " in text
        assert "remark" in text
    else:
        assert json.loads(text) == {"kind": "row", "table": "Title", "a": 0.12345}


@pytest.mark.parametrize("terminal", [True, False])
def test_downloads_are_shown_to_a_reader(terminal):
    shown = screen(terminal)
    with shown.downloading() as watch:
        advance = watch("file.gz")
        advance(512, 1024)
        advance(1024, 1024)
    assert ("file.gz" in shown.console.file.getvalue()) == terminal
