"""The daemon that a training process starts is tied to it by nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import ddpprobe
from ddpprobe.daemon.launch import daemon_alive, start_daemon, wait_for_daemon
from ddpprobe.rundir.paths import RunDir, make_dir, write_json

from ..kernel import TELLS_THE_REAPED
from ..waiting import PATIENCE

NODE = "node_0000"
Poll = Callable[..., object]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setenv("DDPPROBE_LISTEN", "127.0.0.1:0")
    run = RunDir(make_dir(tmp_path / "run"))
    write_json(run.run_json, {"run_id": "test-run"})
    yield run
    said = wait_for_daemon(run, NODE, 0.0)
    if said is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(said["pid"])
            daemon.terminate()
            daemon.wait(20 * PATIENCE)


def started(run: RunDir, **options: object) -> psutil.Process:
    start_daemon(run, NODE, **options)  # type: ignore[arg-type]
    said = wait_for_daemon(run, NODE, 20 * PATIENCE)
    assert said is not None, run.daemon_file(NODE, "log").read_text()
    return psutil.Process(said["pid"])


def test_it_says_where_it_serves_and_holds_the_lock(run) -> None:
    assert not daemon_alive(run, NODE)
    daemon = started(run, gather_listen="127.0.0.1:0", token="secret")
    said = wait_for_daemon(run, NODE, 0.0)
    assert daemon_alive(run, NODE)
    assert said is not None
    assert said["run_id"] == "test-run"
    for key in ("listen", "gather"):
        host, port = said[key].split(":")
        socket.create_connection((host, int(port)), 5).close()
    assert daemon.is_running()


def test_starting_it_twice_leaves_one(run, poll: Poll) -> None:
    first = started(run)
    start_daemon(run, NODE)
    poll(lambda: "one serves node_0000" in run.daemon_file(NODE, "log").read_text())
    assert wait_for_daemon(run, NODE, 5.0)["pid"] == first.pid


def test_it_is_no_child_of_ours_and_in_a_session_of_its_own(run) -> None:
    daemon = started(run)
    assert os.getpid() not in {p.pid for p in daemon.parents()[:1]}
    assert daemon not in psutil.Process().children(recursive=True)
    assert os.getsid(daemon.pid) != os.getsid(0)
    assert os.getpgid(daemon.pid) != os.getpgid(0)
    assert daemon.cwd() == "/"


def test_it_inherits_no_descriptor_and_no_secret(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-two")
    server = socket.create_server(("127.0.0.1", 0))
    server.set_inheritable(True)
    file = (tmp_path / "shard.bin").open("w")
    os.set_inheritable(file.fileno(), True)
    try:
        daemon = started(run, token="the-gather-s")
        links = [os.readlink(p) for p in Path(f"/proc/{daemon.pid}/fd").iterdir()]
        assert str(tmp_path / "shard.bin") not in links
        inode = os.fstat(server.fileno()).st_ino
        assert f"socket:[{inode}]" not in links
        assert os.readlink(f"/proc/{daemon.pid}/fd/0") == "/dev/null"
        environment = Path(f"/proc/{daemon.pid}/environ").read_text()
        assert "canary" not in environment
        assert "the-gather-s" in environment
        assert "the-gather-s" not in " ".join(daemon.cmdline())
    finally:
        server.close()
        file.close()


def test_its_log_is_ours_alone_to_read(run) -> None:
    started(run)
    assert run.daemon_file(NODE, "log").stat().st_mode & 0o777 == 0o600


def test_it_outlives_the_one_that_started_it_and_the_kill_of_its_group(run, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ddpprobe.rundir.paths import RunDir\n"
        "from ddpprobe.daemon.launch import start_daemon\n"
        f"start_daemon(RunDir(Path({str(run.path)!r})), {NODE!r})\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == b"started\n"
        said = wait_for_daemon(run, NODE, 20 * PATIENCE)
        os.killpg(training.pid, signal.SIGKILL)  # as torchrun ends its children
        training.wait()
    assert said is not None
    assert daemon_alive(run, NODE)
    assert wait_for_daemon(run, NODE, 0.0) == said


def test_a_file_in_the_working_directory_is_not_taken_for_a_module(
    run, tmp_path, monkeypatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the user’s file was run')")
    monkeypatch.chdir(tmp_path)
    assert started(run).is_running()


def waiting_python(begin: Path) -> str:
    """Return a script that becomes Python when a file is there."""
    wait = f"while ! test -e {begin}; do sleep 0.05; done"
    return f'#!/bin/sh\n{wait}\nexec {sys.executable} "$@"\n'


def test_starting_waits_for_no_daemon_and_takes_no_thread(run, tmp_path, monkeypatch) -> None:
    """Its interpreter waits for a file that is there when starting is over."""
    begin, python = tmp_path / "begin", tmp_path / "python"
    python.write_text(waiting_python(begin))
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    threads = threading.active_count()
    start_daemon(run, NODE)
    assert threading.active_count() == threads
    assert not daemon_alive(run, NODE)
    begin.touch()
    assert wait_for_daemon(run, NODE, 20 * PATIENCE) is not None


OVER_AT_ONCE = """
import os, sys, torch, ddpprobe
run, python, how = sys.argv[1:]
sys.executable = python
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ddpprobe.install(model, run_dir=run, every=1)
for _ in range(3):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
if how.startswith("exit:"):
    os._exit(int(how.removeprefix("exit:")))
os.kill(os.getpid(), int(how))
"""


@pytest.mark.skipif(not TELLS_THE_REAPED, reason="PIDFD_INFO_EXIT needs Linux 6.15")
@pytest.mark.parametrize(("how", "said"), [("exit:5", "exit:5"), ("11", "SIGSEGV")])
def test_how_a_script_ended_that_was_over_before_its_daemon_was_there_is_known(
    run, tmp_path, monkeypatch, poll: Poll, how: str, said: str
) -> None:
    monkeypatch.setenv("DDPPROBE_LINGER", "0")
    begin, python, script = tmp_path / "begin", tmp_path / "python", tmp_path / "train.py"
    python.write_text(waiting_python(begin))
    python.chmod(0o700)
    script.write_text(OVER_AT_ONCE)
    subprocess.run([sys.executable, script, tmp_path / "its", python, how], check=False)
    assert not (tmp_path / "its" / "daemon" / f"{NODE}.lock").exists()
    begin.touch()
    its = ddpprobe.open(tmp_path / "its")
    poll(lambda: its.info()["state"] not in {"running", "vanished"})
    assert its.info()["end"]["message"] == f"rank 0 died ({said}) after step 2"


def test_what_a_killed_daemon_left_is_not_taken_for_a_living_one(run) -> None:
    daemon = started(run)
    daemon.kill()
    daemon.wait(10 * PATIENCE)
    assert run.daemon_file(NODE, "json").exists()
    assert not daemon_alive(run, NODE)
    assert wait_for_daemon(run, NODE, 0.2) is None
    assert started(run).pid != daemon.pid


def test_nobody_there_is_said_after_the_time_given(run) -> None:
    begin = time.monotonic()
    assert wait_for_daemon(run, NODE, 0.1) is None
    assert time.monotonic() - begin >= 0.1


def test_a_directory_that_cannot_be_written_is_an_error_at_once(tmp_path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="Not a directory|File exists"):
        start_daemon(RunDir(tmp_path / "run"), NODE)


def test_half_a_file_is_no_answer(run) -> None:
    make_dir(run.path / "daemon")
    run.daemon_file(NODE, "json").write_text(json.dumps({"pid": os.getpid()})[:-3])
    assert wait_for_daemon(run, NODE, 0.0) is None


def test_a_daemon_killed_as_the_job_ends_is_followed_by_one_that_ends_what_it_left(
    tmp_path, monkeypatch, poll: Poll
) -> None:
    """No look of the training comes between the kill and the end of the job."""
    targets = tmp_path / "targets"
    for name, value in {"LISTEN": "127.0.0.1:0", "LINGER": "0", "SD_DIR": str(targets)}.items():
        monkeypatch.setenv(f"DDPPROBE_{name}", value)
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    probe = ddpprobe.install(net, run_dir=tmp_path / "run", every=1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run, joined = RunDir(tmp_path / "run"), probe._joined
    assert joined is not None
    said = wait_for_daemon(run, NODE, 20 * PATIENCE)
    poll(lambda: list(targets.rglob("*.json")))
    poll(lambda: joined._keeper)
    keeper = joined._keeper
    assert keeper is not None
    keeper._next, keeper._started = math.inf, -math.inf  # the daemon has been there for long
    daemon = psutil.Process(said["pid"])
    daemon.kill()
    daemon.wait(10 * PATIENCE)
    poll(lambda: not daemon_alive(run, NODE))
    assert list(targets.rglob("*.json"))
    probe.close()
    poll(lambda: not list(targets.rglob("*.json")))
    poll(lambda: not daemon_alive(run, NODE))
    assert ddpprobe.open(run.path).info()["state"] == "ended"
