"""docs/checkpoints.md: its program, killed and started again, ends where it would have ended."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "checkpoints.md"
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
ENVIRONMENT = os.environ | {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles quickly
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


class Runs:
    """The page's program, in folders of its own, with the same compiled code everywhere."""

    def __init__(self, folder, program=PROGRAM):
        self.folder = folder
        ending = (
            "\nfrom kldwrm_jax.experiments.provenance import fingerprint\n"
            "print('fingerprint', fingerprint((state.params, state.opt_state)))\n"
        )
        (folder / "program.py").write_text(program + ending)
        self.environment = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}

    def start(self, name):
        where = self.folder / name
        where.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, self.folder / "program.py"],
            cwd=where,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, name):
        """What it prints."""
        with self.start(name) as process:
            out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        return out

    def checkpoints(self, name):
        """Steps of the whole ones."""
        found = (self.folder / name / "checkpoints").glob("*")
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def kill_after(self, name, checkpoints, delay):
        """Kills it so long after so many more checkpoints."""
        with self.start(name) as process:
            seen = set(self.checkpoints(name))
            enough = len(seen) + checkpoints
            while process.poll() is None and len(seen) < enough:
                seen |= set(self.checkpoints(name))
                time.sleep(0.001)
            time.sleep(delay)
            killed = process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.communicate()
        return killed


def kill_and_resume(runs, kills):
    rng = random.Random(0)
    whole = runs.finish("whole")
    killed = [runs.kill_after("killed", 1 + i % 2, 0.05 * rng.random()) for i in range(kills)]
    assert killed[0]
    resumed_from = runs.checkpoints("killed")
    if resumed_from:  # what a kill may leave of the next: half of its files, under another name
        folder = runs.folder / "killed" / "checkpoints"
        half = folder / f"{resumed_from[-1] + 5}.orbax-checkpoint-tmp"
        shutil.copytree(folder / str(resumed_from[-1]), half, dirs_exist_ok=True)
        for path in half.rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = runs.finish("killed")
    assert re.search(r"60 steps, 0 rejected; loss 0\.\d+\nfingerprint \w{64}", whole)
    assert again == whole


@pytest.mark.outside
def test_the_program_killed_hard_ends_with_the_same_bits(tmp_path):
    kill_and_resume(Runs(tmp_path), kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["kfac", "so_kldwrm", "q_kldwrm", "qe_kldwrm"])
def test_every_optimizer_killed_many_times_ends_with_the_same_bits(optimizer, tmp_path):
    program = PROGRAM.replace("kw.q_kldwrm", f"kw.{optimizer}")
    kill_and_resume(Runs(tmp_path, program), kills=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nn.Dense(16)", "nn.Dense(17)", r"shape: \(17,\) is not compatible .* shape: \(16,\)"),
        ("kw.q_kldwrm", "kw.kfac", r"opt_state\.pull:\n.*NoneType"),
    ],
    ids=["model", "optimizer"],
)
def test_a_checkpoint_of_another_is_refused(old, new, message, tmp_path):
    Runs(tmp_path).finish("run")
    with Runs(tmp_path, PROGRAM.replace(old, new)).start("run") as process:
        _, err = process.communicate()
    assert process.returncode != 0
    assert re.search(message, err)
