"""The files by which a Prometheus finds the daemons: whose they are, and when they go."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from ddpprobe.rundir import paths, targets
from ddpprobe.rundir.targets import (
    KEEP_SECONDS,
    RECENT_SECONDS,
    STALE_SECONDS,
    TargetFile,
    was_left_just_now,
    withdraw,
)

HOST = socket.gethostname()


def said(directory: Path) -> list[tuple[str, str]]:
    """Return (target, run) of every file that the patterns find, as Prometheus does."""
    found = []
    for pattern in targets.patterns(directory):
        for path in sorted(Path("/").glob(pattern.removeprefix("/"))):
            for group in json.loads(path.read_bytes()):
                found += [(target, group["labels"]["run"]) for target in group["targets"]]
    return found


@pytest.mark.parametrize(
    ("listen", "target"),
    [
        ("127.0.0.1:13377", "127.0.0.1:13377"),
        ("[::1]:13377", "[::1]:13377"),
        ("0.0.0.0:13378", f"{HOST}:13378"),
        ("[::]:13378", f"{HOST}:13378"),
        ("10.1.2.3:13377", "10.1.2.3:13377"),
    ],
)
def test_a_daemon_is_found_at_an_address_that_leads_to_it(tmp_path, listen, target) -> None:
    file = TargetFile(tmp_path, "gpt-a1b2c3", "node_0000", listen)
    file.keep(0.0)
    assert said(tmp_path) == [(target, "gpt-a1b2c3")]
    file.remove()
    assert said(tmp_path) == []


def test_another_machine_that_shares_the_directory_does_not_take_a_loopback_address(
    tmp_path, monkeypatch
) -> None:
    TargetFile(tmp_path, "local", "node_0000", "127.0.0.1:13377").keep(0.0)
    TargetFile(tmp_path, "open", "node_0000", "0.0.0.0:13378").keep(0.0)
    assert [run for _, run in said(tmp_path)] == ["open", "local"]
    monkeypatch.setattr(targets, "_hostname", lambda: "elsewhere")
    assert said(tmp_path) == [(f"{HOST}:13378", "open")]


def test_a_killed_daemon_is_missed_when_another_run_has_its_port(tmp_path) -> None:
    TargetFile(tmp_path, "killed", "node_0000", "127.0.0.1:13377").keep(0.0)
    TargetFile(tmp_path, "next", "node_0000", "127.0.0.1:13377").keep(0.0)
    TargetFile(tmp_path, "everywhere", "node_0000", "0.0.0.0:13377").keep(0.0)
    assert sorted(run for _, run in said(tmp_path)) == ["everywhere", "killed", "next"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_who_finishes_a_run_takes_away_what_its_killed_daemon_left(tmp_path, host) -> None:
    runs = [("gpt", "node_0000"), ("gpt", "node_0001"), ("other", "node_0000")]
    files = [
        TargetFile(tmp_path, run, node, f"{host}:{13377 + n}") for n, (run, node) in enumerate(runs)
    ]
    for file in files:
        file.keep(0.0)
    withdraw(tmp_path, "gpt", "node_0000")
    assert [file.path.exists() for file in files] == [False, True, True]
    withdraw(tmp_path / "none", "gpt", "node_0000")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_was_left_just_now_is_told_from_what_was_left_long_ago(tmp_path, host) -> None:
    file = TargetFile(tmp_path, "gpt", "node_0000", f"{host}:13377")
    assert not was_left_just_now(tmp_path, "gpt", "node_0000")
    file.keep(0.0)
    assert was_left_just_now(tmp_path, "gpt", "node_0000")
    assert not was_left_just_now(tmp_path, "gpt", "node_0001")
    assert not was_left_just_now(tmp_path, "other", "node_0000")
    assert not was_left_just_now(tmp_path / "none", "gpt", "node_0000")
    # A daemon gives its last sign of life up to a minute before it is killed.
    for age, recent in ((KEEP_SECONDS + 30, True), (RECENT_SECONDS + 1, False)):
        os.utime(file.path, (0, time.time() - age))
        assert was_left_just_now(tmp_path, "gpt", "node_0000") == recent


def test_a_file_without_a_sign_of_life_goes_and_what_others_put_there_stays(tmp_path) -> None:
    dead = TargetFile(tmp_path, "dead", "node_0000", "0.0.0.0:13377")
    alive = TargetFile(tmp_path, "alive", "node_0000", "127.0.0.1:13378")
    others = tmp_path / "node-exporter.json"
    others.write_text("[]")
    for file in (dead, alive):
        file.keep(0.0)
    for path in (dead.path, alive.path, others):
        before = time.time() - STALE_SECONDS - 1
        os.utime(path, (before, before))
    alive.keep(KEEP_SECONDS + 1)
    TargetFile(tmp_path, "new", "node_0000", "127.0.0.1:13379").keep(0.0)
    assert [run for _, run in said(tmp_path)] == ["alive", "new"]
    assert others.exists()


def test_a_file_that_was_taken_away_is_made_again(tmp_path) -> None:
    file = TargetFile(tmp_path, "gpt", "node_0000", "127.0.0.1:13377")
    file.keep(0.0)
    file.path.write_text("[]")
    file.keep(KEEP_SECONDS - 1)
    assert file.path.read_text() == "[]"
    file.keep(KEEP_SECONDS + 1)
    file.path.unlink()
    file.keep(2 * KEEP_SECONDS + 2)
    assert said(tmp_path) == [("127.0.0.1:13377", "gpt")]


def test_names_of_runs_lead_to_no_other_directory(tmp_path) -> None:
    odd = ["../../x", "a/b", "", "\n", "x" * 900 + "-1", "x" * 900 + "-2"]
    for number, run in enumerate(odd):
        TargetFile(tmp_path, run, "node_0000", f"127.0.0.1:{1000 + number}").keep(0.0)
    assert sorted(run for _, run in said(tmp_path)) == sorted(odd)
    assert {path.parent for path in tmp_path.rglob("*.json")} == {tmp_path / HOST}


def test_a_directory_that_refuses_is_said_once_and_stops_nothing(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    file = TargetFile(tmp_path / "file", "gpt", "node_0000", "127.0.0.1:13377")
    file.keep(0.0)
    file.keep(KEEP_SECONDS + 1)
    file.remove()
    assert [r.getMessage().count("Prometheus") for r in caplog.records] == [1]


def test_the_default_is_a_directory_of_this_user_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("DDPPROBE_SD_DIR", raising=False)
    default = paths.sd_dir()
    assert default == paths.own_sd_dir()
    assert str(os.geteuid()) in str(default)
    monkeypatch.setattr(paths, "own_sd_dir", lambda: tmp_path / "mine" / "targets")
    TargetFile(tmp_path / "mine" / "targets", "gpt", "node_0000", "0.0.0.0:13377").keep(0.0)
    for path in (tmp_path / "mine", tmp_path / "mine" / "targets"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_where_everybody_may_write_no_link_is_followed(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").symlink_to("theirs")
    monkeypatch.setattr(paths, "own_sd_dir", lambda: tmp_path / "mine" / "targets")
    TargetFile(tmp_path / "mine" / "targets", "gpt", "node_0000", "0.0.0.0:13377").keep(0.0)
    assert not list((tmp_path / "theirs").iterdir())
    assert "no directory of this user's" in caplog.text


def test_the_variable_names_a_directory_or_switches_it_off(monkeypatch) -> None:
    monkeypatch.setenv("DDPPROBE_SD_DIR", "/shared/targets")
    assert paths.sd_dir() == Path("/shared/targets")
    monkeypatch.setenv("DDPPROBE_SD_DIR", "")
    assert paths.sd_dir() is None
