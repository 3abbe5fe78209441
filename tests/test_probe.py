"""`install()` refuses loudly before training; after it returns nothing of ours is raised."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.daemon import launch, local_rank
from ddpprobe.daemon.__main__ import main as daemon_main
from ddpprobe.rank import disk_thread
from ddpprobe.rank.peer_watcher import Process
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import RunDir

from . import forked_script

LOCAL = "127.0.0.1:0"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def train(net: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(steps):
        net(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, r"takes a torch.nn.Module, got int. Write ddpprobe.install\(model\)"),
        ({"model": [nn.Linear(1, 1)] * 2}, r"got list. .* write ddpprobe.install\({'generator': g"),
        ({"model": nn.ReLU()}, "ReLU has no parameters"),
        ({"every": -1}, "every must be an integer of at least 1 .* got -1"),
        ({"every": 0}, "got 0"),
        (
            {"include": "layers.*"},
            r"include glob 'layers\.\*' matches no module. There are: 0, 1, 2",
        ),
        ({"exclude": ["0", "nope"]}, "exclude glob 'nope' matches no module"),
        ({"backward": "auto"}, r"backward must be one of \('output', 'full'\), got 'auto'"),
        ({"daemon": "yes"}, "daemon must be one of"),
        ({"first_step": -3}, "first_step must be a step number"),
        ({"budget": 1.0}, r"budget must be a share of the step time, between 0 and 1 .* got 1\.0"),
        ({"budget": "1%"}, "got '1%'"),
        ({"budget": 0}, "got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message: str, tmp_path: Path) -> None:
    given = {"model": model(), "run_dir": tmp_path / "r", "daemon": "none", **arguments}
    with pytest.raises(ValueError, match=message):
        ddpprobe.install(**given)


def test_a_refused_install_leaves_no_hook_and_can_be_repeated(tmp_path: Path) -> None:
    net = model()
    with pytest.raises(ValueError, match="matches no module"):
        ddpprobe.install(net, run_dir=tmp_path / "r", include="x", daemon="none")
    assert not net._forward_hooks
    ddpprobe.install(net, run_dir=tmp_path / "r", daemon="none").close()


def test_outside_linux_it_is_refused_in_one_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", "darwin")
        with pytest.raises(ddpprobe.InstallError) as caught:
            ddpprobe.install(net, run_dir=tmp_path / "r", daemon="none")
        assert str(caught.value).endswith(
            "install() records on Linux only, and this is darwin: train on Linux, or set "
            "DDPPROBE_DISABLE=1 to train here without a probe."
        )
        assert not list(tmp_path.iterdir())
        assert not net._forward_hooks
        elsewhere.setenv("DDPPROBE_DISABLE", "1")
        assert ddpprobe.install(net, run_dir=tmp_path / "r").run_dir is None
    ddpprobe.install(net, run_dir=tmp_path / "r", daemon="none").close()


def test_a_second_install_on_the_same_model_is_refused_until_the_first_is_closed(tmp_path) -> None:
    net = model()
    first = ddpprobe.install(net, run_dir=tmp_path / "a", daemon="none")
    with pytest.raises(ValueError, match=r"already has a probe .* Call probe.close\(\)"):
        ddpprobe.install(net, run_dir=tmp_path / "b", daemon="none")
    first.close()
    ddpprobe.install(net, run_dir=tmp_path / "b", daemon="none").close()


def test_a_directory_held_by_a_live_run_is_refused(tmp_path: Path) -> None:
    with (
        ddpprobe.install(model(), run_dir=tmp_path / "r", daemon="none"),
        pytest.raises(ValueError, match=r"is held by a live run.* after init_process_group"),
    ):
        ddpprobe.install(model(), run_dir=tmp_path / "r", daemon="none")


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="not empty and not a ddpprobe run"):
        ddpprobe.install(model(), run_dir=tmp_path, daemon="none")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"format_version": 99}', "written by a newer ddpprobe .format_version 99"),
        ('{"format_version": 0}', "written by an older ddpprobe"),
        ("[1", "its run.json is damaged"),
    ],
)
def test_a_run_of_another_format_is_not_continued(tmp_path: Path, said: str, why: str) -> None:
    place = tmp_path / "r"
    ddpprobe.install(model(), run_dir=place, daemon="none").close()
    whole = (place / "run.json").read_text()
    (place / "run.json").write_text(said)
    with pytest.raises(ValueError, match=f"cannot be continued: {why}.*Give run_dir="):
        ddpprobe.install(model(), run_dir=place, daemon="none")
    (place / "run.json").write_text(whole)
    ddpprobe.install(model(), run_dir=place, daemon="none").close()  # the lock was given back


def test_a_finished_run_gets_a_further_attempt(tmp_path: Path, records_of) -> None:
    for _ in range(2):
        with ddpprobe.install(net := model(), run_dir=tmp_path / "r", every=1, daemon="none"):
            train(net)
    first, second = (records_of(tmp_path / "r", attempt=a) for a in (0, 1))
    assert [r.step for r in first] == [r.step for r in second] == [0, 1, 2]
    assert {r.attempt for r in second} == {1}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to the run directory .* Not a directory"):
        ddpprobe.install(model(), run_dir=tmp_path / "file" / "r", daemon="none")


def test_the_environment_overrides_the_arguments(tmp_path, monkeypatch, records_of) -> None:
    monkeypatch.setenv("DDPPROBE_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("DDPPROBE_EVERY", "2")
    with ddpprobe.install(net := model(), run_dir=tmp_path / "arg", every=1, daemon="none"):
        train(net, steps=5)
    assert not (tmp_path / "arg").exists()
    assert [r.step for r in records_of(tmp_path / "env")] == [0, 2, 4]
    monkeypatch.setenv("DDPPROBE_EVERY", "many")
    with pytest.raises(ValueError, match="DDPPROBE_EVERY must be a whole number"):
        ddpprobe.install(net, daemon="none")
    monkeypatch.delenv("DDPPROBE_EVERY")
    monkeypatch.setenv("DDPPROBE_BUDGET", "much")
    with pytest.raises(ValueError, match="budget must be a share .* got DDPPROBE_BUDGET=much"):
        ddpprobe.install(net, daemon="none", budget=0.5)


def test_disabled_it_does_nothing_at_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DDPPROBE_DISABLE", "1")
    monkeypatch.chdir(tmp_path)
    net = model()
    with ddpprobe.install(net) as probe, probe.pause("eval"):
        probe.log(loss=1.0)
        probe.step()
        assert not net._forward_hooks
    assert os.listdir(tmp_path) == []


def test_logged_numbers_join_the_step(tmp_path: Path, records_of) -> None:
    net = model()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = net(torch.randn(3, 4)).pow(2).mean()
        probe.log(loss=loss, tokens=12)
        loss.backward()
        optimizer.step()
        probe.log(late=1.0)
    (record,) = records_of(tmp_path / "r")
    assert record.scalars[0]["loss"] == pytest.approx(loss.item())
    assert record.scalars[0]["tokens"] == 12
    assert record.scalars[0]["late"] == 1.0


def test_paused_the_model_is_all_the_users(tmp_path: Path, records_of) -> None:
    net = model()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        train(net, steps=1)
        with probe.pause("validation"):
            assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
            net(torch.randn(3, 4)).sum()
        train(net, steps=1)
    assert [r.step for r in records_of(tmp_path / "r")] == [0, 1]


def test_of_nested_pauses_the_outermost_one_counts(tmp_path: Path, records_of) -> None:
    net = model()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        train(net, steps=1)
        with probe.pause("validation"):
            with probe.pause("checkpoint"):
                pass
            assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
            train(net, steps=2)
        with pytest.raises(KeyError), probe.pause("a"), probe.pause("b"):
            raise KeyError
        train(net, steps=1)
    assert [r.step for r in records_of(tmp_path / "r")] == [0, 1]


def test_nested_pauses_before_the_process_group_leave_no_hook(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = model()
    probe = ddpprobe.install(net, daemon="none")
    hooks = [len(m._forward_pre_hooks) for m in net.modules()]
    with probe.pause("a"):
        with probe.pause("b"):
            pass
        assert not any(m._forward_pre_hooks for m in net.modules())
    assert [len(m._forward_pre_hooks) for m in net.modules()] == hooks
    probe.close()
    assert not any(m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("config", [3, "abc", [("lr", 0.1)], argparse.Namespace(lr=0.1)])
def test_a_config_that_is_no_mapping_is_told_once_and_training_goes_on(
    config: object, tmp_path: Path, records_of, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        for _ in range(2):
            probe.note(config=config)
            probe.note("unfreeze", config={"lr": 0.1})
            train(net, steps=1)
            probe.log(seen=1.0)
    assert [r.scalars[0]["seen"] for r in records_of(tmp_path / "r")] == [1.0, 1.0]
    assert caplog.text.count("config=vars(args), and it is a " + type(config).__name__) == 1
    assert ddpprobe.open(tmp_path / "r").info()["attempts"][-1]["config"] == {"lr": "0.1"}


def test_whatever_breaks_inside_training_goes_on_unchanged(tmp_path, monkeypatch) -> None:
    from ddpprobe.rank.stats import rows
    from ddpprobe.testing import state_hash

    monkeypatch.delenv("DDPPROBE_STRICT")

    def run(*, broken_at: int | None) -> str:
        calls = 0

        def explode(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == broken_at:
                raise RuntimeError("ours")

        net = model()
        probe = None
        if broken_at is not None:
            monkeypatch.setattr(rows, "reduce_into", explode)
            probe = ddpprobe.install(net, run_dir=tmp_path / str(broken_at), every=1, daemon="none")
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(4):
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if probe is not None:
            probe.close()
            assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
        return state_hash(net, optimizer)

    clean = run(broken_at=None)
    for call in range(1, 40):
        assert run(broken_at=call) == clean


def test_a_forked_child_is_inert(tmp_path: Path, records_of) -> None:
    net = model()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(net, steps=1)
        child = os.fork()
        if child == 0:
            train(net, steps=3)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(net, steps=1)
    assert [r.step for r in records_of(tmp_path / "r")] == [0, 1]


def test_another_rank_is_watched_through_a_fork_until_the_probe_is_closed(
    tmp_path: Path, poll: Callable[..., object]
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = psutil.Process(other.pid).create_time()
        before = threading.active_count()
        probe = ddpprobe.install(model(), run_dir=tmp_path / "r", daemon="none")
        watcher = probe._joined.peer_watcher
        watcher.start({1: replace(Process.own(), pid=other.pid, started=started)})
        child = os.fork()
        if child == 0:
            held = [fd.read_text() for fd in Path("/proc/self/fdinfo").iterdir() if fd.exists()]
            os._exit(any("Pid:" in text for text in held))
        assert os.waitpid(child, 0)[1] == 0
        other.kill()
        journal = JournalTail(RunDir(tmp_path / "r").rank_journal(0, "node_0000", 0))
        told: list[dict[str, object]] = []

        def is_told() -> bool:
            told.extend(f.json() for f in journal.poll() if f.type == framing.LIFE)
            return any(said["event"] == "peer_exit" for said in told)

        poll(is_told)
        probe.close()
        journal.close()
        assert threading.active_count() == before
    (said,) = [said for said in told if said["event"] == "peer_exit"]
    assert (said["rank"], said["how"], said["alive"]) == (1, "SIGKILL", [0])


SCRIPT = """
import sys, torch, ddpprobe
net = torch.nn.Linear(4, 2)
ddpprobe.install(net, run_dir=sys.argv[1], every=1, daemon="none")
net(torch.randn(3, 4)).sum().backward()
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "status"),
    [("", 0, "ok"), ("raise SystemExit(7)", 7, "ok"), ("1 / 0", 1, "exception")],
)
def test_at_exit_the_journal_is_closed_and_the_exit_code_is_the_users(
    end: str, code: int, status: str, tmp_path: Path
) -> None:
    script, run = SCRIPT.format(end=end), tmp_path / "r"
    done: forked_script.Script | subprocess.CompletedProcess[str]
    if status == "exception":  # one of them is an interpreter of its own from the first line on
        words = [sys.executable, "-c", script, str(run)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    else:
        done = forked_script.run(tmp_path, script, run)
    assert done.returncode == code, done.stderr
    lines = done.stderr.replace("ddpprobe.install", "").splitlines()
    assert not [line for line in lines if "ddpprobe" in line and "it was not tried on" not in line]
    wal = next((tmp_path / "r").rglob("rank_00000/*.wal")).read_bytes()
    closed = wal[wal.index(b'{"event":"closed"') :].decode(errors="replace")
    told, _ = json.JSONDecoder().raw_decode(closed)
    assert (told["status"], told["sampled"]) == (status, 0)


NO_DAEMON = "the daemon of node_0000 cannot be started"
REFUSALS = {
    "no process": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "no memory": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "no memory in Python": MemoryError(),
    "no descriptor": OSError(errno.EMFILE, "Too many open files"),
    "the shell hangs": subprocess.TimeoutExpired("sh", 10),
    "the shell fails": subprocess.CalledProcessError(2, "sh"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_without_a_process_for_the_daemon_it_trains_and_says_so_once(
    why: str, tmp_path: Path, monkeypatch, caplog, records_of
) -> None:
    asked: list[object] = []

    def refuse(command: list[str], **options: object) -> None:
        asked.append(command)
        raise REFUSALS[why]

    with monkeypatch.context() as patched:
        patched.setattr(launch.subprocess, "run", refuse)
        patched.setattr(launch, "CHECK_SECONDS", 0.0)
        patched.setattr(disk_thread, "CHORE_SECONDS", 0.01)  # asked for a daemon again and again
        net = model()
        probe = ddpprobe.install(net, run_dir=tmp_path / "r", every=1)
        train(net, 5)
        deadline = time.monotonic() + 60
        while len(asked) <= 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        probe.close()
    assert len(asked) > 3
    (said,) = [r.getMessage() for r in caplog.records if "daemon" in r.getMessage()]
    assert NO_DAEMON in said
    assert f"`ddpprobe daemon --dir {tmp_path / 'r'} --node node_0000`" in said
    assert [r.step for r in records_of(tmp_path / "r")] == list(range(5))


def test_a_run_that_trained_without_a_daemon_is_folded_by_hand(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise REFUSALS["no process"]

    net = model()
    with monkeypatch.context() as patched:
        patched.setattr(launch.subprocess, "run", refuse)
        probe = ddpprobe.install(net, run_dir=tmp_path / "r", every=1)
    train(net, 5)
    probe.close()
    monkeypatch.setattr(local_rank, "PATIENCE_SECONDS", 0.0)  # this process, the rank's, lives on
    words = ["--dir", str(tmp_path / "r"), "--node", "node_0000", "--listen", LOCAL]
    assert daemon_main([*words, "--linger", "0"]) == 0
    run = ddpprobe.open(tmp_path / "r")
    assert run.info()["attempts"][0]["sealed"]
    assert [r.step for r in run.records()] == list(range(5))
    assert verify(run).ok


WITHOUT_PROC = """
import sys, torch
import ddpprobe
net = torch.nn.Linear(3, 1)
probe = ddpprobe.install(net, run_dir=sys.argv[1], every=1, daemon=sys.argv[2])
optimizer = torch.optim.SGD(net.parameters())
for _ in range(4):
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
probe.close()
print("trained")
"""


def test_without_proc_it_trains_and_its_records_can_be_folded(tmp_path: Path) -> None:
    shell = f"""mount -t tmpfs none /proc || exit 99
{sys.executable} -c "$1" "$2" none || exit 1
{sys.executable} -m ddpprobe.daemon --dir "$2" --node node_0000 --listen {LOCAL}"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", shell, "sh", WITHOUT_PROC, str(tmp_path / "r")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"a mount namespace needs root: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "Traceback" not in done.stderr
    run = ddpprobe.open(tmp_path / "r")
    assert [r.step for r in run.records()] == list(range(4))
    assert list((tmp_path / "r").rglob("rank_*/*.wal")) == []
    assert verify(run).ok


@pytest.mark.parametrize(
    "first", [[], ["sh", "-c", '"$@"; exit $?', "sh"]], ids=["itself", "a script of the shell"]
)
def test_a_container_that_ends_with_the_job_is_told_once(tmp_path: Path, first: list[str]) -> None:
    job = [sys.executable, "-c", WITHOUT_PROC, str(tmp_path / "r"), "auto"]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *first, *job],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"a PID namespace needs root: {done.stderr.strip()}")
    assert (done.returncode, "trained" in done.stdout) == (0, True), done.stderr
    assert done.stderr.count("process 1 of this PID namespace (a container?) is of the job") == 1
