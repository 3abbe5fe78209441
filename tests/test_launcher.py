"""What is launched ends with the tests, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

# The server imports nothing here: this is about processes.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests import launcher

if __name__ == "__main__":
    here = Path(sys.argv[1])
    launcher._server.set_forkserver_preload([])
    where = {"cwd": here, "env": os.environ, "out": here / "out", "err": here / "out"}
    made = launcher.Launcher(None, [here / "script.py", here / "pids"], **where, fresh=False)
    while not (here / "pids").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
SCRIPT = """
import os, sys, time
from pathlib import Path

text = f"{os.getpid()} {os.getppid()}"
Path("written").write_text(text)
Path("written").rename(sys.argv[1])
time.sleep(600)
"""


def test_a_killed_run_leaves_no_server_and_no_job(tmp_path: Path, poll) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, tmp_path / "killed.py", tmp_path]
    log = tmp_path / "log"
    with log.open("w") as file:
        done = subprocess.run(command, env=env, stdout=file, stderr=file, check=False)
    assert done.returncode == -9, log.read_text()
    job, server = map(int, (tmp_path / "pids").read_text().split())
    poll(lambda: not psutil.pid_exists(job) and not psutil.pid_exists(server))


def test_a_script_alone_ends_as_its_interpreter_would(torchrun) -> None:
    done = torchrun("import sys\nprint(sys.argv[1:])\nsys.exit('no')\n", nproc=0)
    assert (done.returncode, done.stdout, done.stderr) == (1, "[]\n", "no\n")
    done = torchrun("import atexit\natexit.register(print, 'left')\n1 / 0\n", nproc=0)
    assert (done.returncode, done.stdout) == (1, "left\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_the_parent_of_a_rank_is_torchrun_by_its_command_line(torchrun) -> None:
    script = """
import os
from ddpprobe.rundir.processes import torchrun_of
print(torchrun_of(os.getpid()) == os.getppid())
"""
    assert torchrun(script, nproc=1).stdout == "True\n"
