"""The service of a user starts the daemons of that user's jobs, and looks after them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from ddpprobe.daemon import service as service_module
from ddpprobe.daemon import service_request
from ddpprobe.daemon.launch import daemon_alive, start_daemon, wait_for_daemon
from ddpprobe.daemon.service import RESTARTS, DaemonService
from ddpprobe.daemon.service_request import BadRequestError, DaemonRequest, decode, namespaces
from ddpprobe.rundir.paths import RunDir, make_dir, write_json

from ..waiting import PATIENCE

NODE = "node_0000"
Poll = Callable[..., object]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the service listens: a socket has no room for a long path."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        found = Path(folder) / "d" / "s.sock"
        monkeypatch.setenv("DDPPROBE_SERVICE", str(found))
        monkeypatch.setattr(service_module, "LOOK_SECONDS", 0.05)
        yield found


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


@contextlib.contextmanager
def served(service: DaemonService) -> Iterator[None]:
    assert service.open()
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield
    finally:
        service.stop()
        thread.join()


def hours() -> Callable[[], float]:
    """Return a clock that goes on by an hour at each look, so that no pause takes long."""
    ticks = itertools.count(0.0, 3600.0)
    return lambda: next(ticks)


def request(*command: str, log: Path) -> DaemonRequest:
    return DaemonRequest(command, dict(os.environ), str(log), namespaces())


def test_a_daemon_is_the_child_of_the_service_and_comes_back_when_it_is_killed(
    run: RunDir, path: Path, poll: Poll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    with served(DaemonService(path, hours())):
        start_daemon(run, NODE, gather_listen="127.0.0.1:0", token="the-gather-s")
        said = wait_for_daemon(run, NODE, 20 * PATIENCE)
        assert said is not None, run.daemon_file(NODE, "log").read_text()
        daemon = psutil.Process(said["pid"])
        assert daemon.ppid() == os.getpid()  # a job's has init for a parent
        assert daemon.cmdline()[-2:-1] == ["--pidfd"]
        assert daemon.cmdline()[-1].startswith(f"{os.getpid()}:")  # of who asked for it
        assert os.getsid(daemon.pid) == daemon.pid
        environment = daemon.environ()
        assert environment["DDPPROBE_TOKEN"] == "the-gather-s"
        assert "WANDB_API_KEY" not in environment
        daemon.kill()
        poll(lambda: (wait_for_daemon(run, NODE, 0.0) or said)["pid"] != daemon.pid)
        again = wait_for_daemon(run, NODE, 0.0)
        assert again is not None
        assert again["gather"]
    assert daemon_alive(run, NODE)  # after the service's end


def test_one_that_is_killed_again_and_again_is_given_up(
    tmp_path: Path, path: Path, poll: Poll
) -> None:
    service = DaemonService(path, hours())
    words = ("/bin/sh", "-c", "echo started; kill -9 $$")
    with served(service):
        assert service_request.ask(words, dict(os.environ), tmp_path / "log")
        poll(lambda: not service._daemons)
    assert (tmp_path / "log").read_text() == "started\n" * (1 + RESTARTS)


def test_one_that_has_done_its_work_is_not_started_again(
    tmp_path: Path, path: Path, poll: Poll
) -> None:
    service = DaemonService(path, hours())
    with served(service):
        for code in (0, 2):
            words = ("/bin/sh", "-c", f"echo {code}; exit {code}")
            assert service_request.ask(words, dict(os.environ), tmp_path / "log")
        poll(lambda: not service._daemons)
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "2"]


def test_what_cannot_be_started_is_left_to_the_one_who_asked(tmp_path: Path, path: Path) -> None:
    with served(DaemonService(path)):
        assert not service_request.ask(["/none/such"], {}, tmp_path / "log")
        assert not service_request.ask(["/bin/true"], {}, tmp_path / "none" / "log")
        assert service_request.ask(["/bin/true"], {}, tmp_path / "log")


def test_a_job_that_sees_other_files_or_processes_is_refused(tmp_path: Path) -> None:
    other = asdict(request("/bin/true", log=tmp_path / "log"))
    for number in range(2):
        names = list(namespaces())
        names[number] += "0"
        data = json.dumps(other | {"namespaces": names}).encode()
        with pytest.raises(BadRequestError, match="in a container, or has a /tmp of its own"):
            decode(data)


@pytest.mark.parametrize(
    "change",
    [
        {"command": []},
        {"command": "/bin/true"},
        {"command": [1]},
        {"environment": ["A=b"]},
        {"environment": {"A": 1}},
        {"log": "here"},
        {"log": None},
        {"namespaces": 1},
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    whole = asdict(request("/bin/true", log=tmp_path / "log"))
    assert decode(json.dumps(whole).encode()).log == str(tmp_path / "log")
    with pytest.raises(BadRequestError):
        decode(json.dumps(whole | change).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff" * 100, b"[" * (2 << 20)])
def test_whatever_is_sent_the_service_goes_on(tmp_path: Path, path: Path, data: bytes) -> None:
    with served(DaemonService(path)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            with contextlib.suppress(OSError):  # it does not read all of what is too much
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b'{"started": false}'
        assert service_request.ask(["/bin/true"], {}, tmp_path / "log")


def test_a_service_that_stands_still_is_done_without(
    run: RunDir, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_request, "ANSWER_SECONDS", 0.01)
    make_dir(path.parent)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen(1)
        start_daemon(run, NODE)
        said = wait_for_daemon(run, NODE, 20 * PATIENCE)
    assert said is not None
    assert psutil.Process(said["pid"]).ppid() != os.getpid()


def test_another_user_s_socket_is_told_nothing(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dir(path.parent)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen(1)
        monkeypatch.setattr(service_request.os, "geteuid", lambda: 12345)
        assert not service_request.ask(["/bin/true"], {"DDPPROBE_TOKEN": "x"}, tmp_path)
        connection, _ = theirs.accept()
        with connection:
            assert connection.recv(100) == b""


def test_the_command_serves_until_sigterm_and_is_alone(tmp_path: Path, path: Path) -> None:
    command = [sys.executable, "-m", "ddpprobe", "daemon", "--service"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        assert f"finds this service at {path}" in service.stderr.readline()
        assert path.stat().st_mode & 0o777 == 0o600
        assert service_request.ask(["/bin/true"], {}, tmp_path / "log")
        assert not DaemonService(path).open()
        service.send_signal(signal.SIGTERM)
        assert service.wait(20 * PATIENCE) == 0
    assert not path.exists()


def test_a_directory_that_others_can_write_to_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        DaemonService(path)
