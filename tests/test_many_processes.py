"""docs/many_processes.py: trained by several processes as by one, resumed by another number."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

PROGRAM = pathlib.Path(__file__).parent.parent / "docs" / "many_processes.py"
ENDING = (
    "\nprint('parameters', *jax.device_get(state['params']['layers_4']['kernel']).ravel()[:8])\n"
)
ENVIRONMENT = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles quickly


@pytest.fixture
def together(tmp_path):
    """Starts so many processes that train in a folder together."""
    (tmp_path / "program.py").write_text(PROGRAM.read_text() + ENDING)

    def start(folder, processes, steps):
        (tmp_path / folder).mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        return [
            subprocess.Popen(
                [sys.executable, tmp_path / "program.py", *map(str, (i, processes, port, steps))],
                cwd=tmp_path / folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
            )
            for i in range(processes)
        ]

    return start


def finish(started):
    """The parameters that every process came to."""
    outs = [process.communicate(timeout=300) for process in started]
    for process, (_, err) in zip(started, outs, strict=True):
        assert process.returncode == 0, err[-3000:]
    found = [re.search(r"parameters (.*)", out).group(1) for out, _ in outs]
    assert len(set(found)) == 1
    return [float(x) for x in found[0].split()]


@pytest.mark.outside
def test_two_processes_train_as_one_does_and_one_goes_on_with_what_they_saved(together):
    alone = finish(together("alone", 1, 40))
    first = finish(together("shared", 2, 20))
    assert first != pytest.approx(alone, rel=1e-3)
    assert finish(together("shared", 1, 40)) == pytest.approx(alone, rel=1e-3, abs=1e-5)


@pytest.mark.outside
def test_two_processes_go_on_with_what_four_saved(together):
    alone = finish(together("alone", 1, 40))
    finish(together("shared", 4, 20))
    assert finish(together("shared", 2, 40)) == pytest.approx(alone, rel=1e-3, abs=1e-5)


@pytest.mark.outside
def test_when_a_process_dies_the_other_stops_and_says_so(together, tmp_path):
    first, second = together("shared", 2, 1_000_000)
    while not list((tmp_path / "shared").glob("checkpoints/20")):
        assert first.poll() is None, first.communicate()[1][-3000:]
        time.sleep(0.1)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, err = first.communicate(timeout=120)
    assert first.returncode != 0
    assert "another task died" in err or "tasks are unhealthy" in err, err[-3000:]
