"""Every code block in the README runs as printed."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_code_block_runs(block, capsys):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "total" in printed
    assert float(re.search(r"loss (\d\.\d+)", printed).group(1)) < 0.3
