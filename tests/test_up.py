"""`ddpprobe up`: what it writes is valid, nobody's work is lost, and Prometheus runs on it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpprobe.cli import main
from ddpprobe.commands import up

from . import prometheus_harness

ROOT = Path(__file__).parent.parent
BOARD = "grafana/dashboards/ddpprobe-overview.json"
Call = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def do(*words: object) -> tuple[int, dict[str, str], str]:
        code = main(["up", *map(str, words), "--no-start", "--json"])
        out, err = capfd.readouterr()
        return code, json.loads(out)["files"] if out else {}, err

    return do


def promtool(*words: object) -> None:
    done = subprocess.run(
        ["promtool", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_it_writes_is_what_prometheus_and_grafana_take(call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, files, err = call(
        "--listen", "0.0.0.0:9999", "--target", "n1:13377", "--target", "[::1]:1"
    )
    here = tmp_path / "ddpprobe-stack"
    assert (code, err) == (0, "")
    assert set(files.values()) == {"written"}
    promtool("check", "config", here / "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", here / "rules/ddpprobe.yml")
    assert yaml.safe_load((here / "targets/ddpprobe.json").read_text()) == [
        {"targets": ["n1:13377", "[::1]:1"], "labels": {}}
    ]
    (source,) = yaml.safe_load(
        (here / "grafana/provisioning/datasources/ddpprobe.yml").read_text()
    )["datasources"]
    assert source["url"] == "http://127.0.0.1:9999"
    (provider,) = yaml.safe_load(
        (here / "grafana/provisioning/dashboards/ddpprobe.yml").read_text()
    )["providers"]
    assert provider["options"]["path"] == str(here / "grafana/dashboards")
    assert (here / BOARD).read_bytes() == (ROOT / BOARD).read_bytes()


def test_by_default_the_first_ports_of_this_machine_are_scraped(call, tmp_path) -> None:
    assert call(tmp_path)[0] == 0
    (group,) = json.loads((tmp_path / "targets/ddpprobe.json").read_text())
    assert group["targets"] == [f"127.0.0.1:{port}" for port in range(13377, 13385)]


def test_a_changed_file_is_kept_and_one_of_ours_is_updated(call, tmp_path, capfd) -> None:
    call(tmp_path)
    mine, ours = tmp_path / "prometheus.yml", tmp_path / "rules/ddpprobe.yml"
    mine.write_text("global: {}\n")
    ours.write_text("groups: [] # of an older version\n")
    written = json.loads((tmp_path / up.WRITTEN).read_text())
    written["rules/ddpprobe.yml"] = up._checksum(ours.read_bytes())
    (tmp_path / up.WRITTEN).write_text(json.dumps(written))
    _, files, _ = call(tmp_path)
    assert files.pop("prometheus.yml") == "kept"
    assert files.pop("rules/ddpprobe.yml") == "updated"
    assert set(files.values()) == {"unchanged"}
    assert mine.read_text() == "global: {}\n"
    assert ours.read_bytes() == (ROOT / "grafana/rules/ddpprobe.yml").read_bytes()
    assert main(["up", str(tmp_path), "--no-start"]) == 0
    assert "you have changed prometheus.yml: kept; --force overwrites" in capfd.readouterr().err
    assert call(tmp_path, "--force")[1]["prometheus.yml"] == "updated"
    assert "scrape_configs" in mine.read_text()


def test_a_file_that_was_there_before_is_nobody_s_to_overwrite(call, tmp_path) -> None:
    (tmp_path / "prometheus.yml").write_text("mine")
    (tmp_path / up.WRITTEN).write_text('["nonsense"]')
    assert call(tmp_path)[1]["prometheus.yml"] == "kept"
    assert (tmp_path / "prometheus.yml").read_text() == "mine"


@pytest.mark.parametrize("words", [("--target", "13377"), ("--listen", "here:port")])
def test_an_address_is_checked_before_anything_is_written(call, tmp_path, words) -> None:
    code, _, err = call(tmp_path / "x", *words)
    assert code == 2
    assert "write HOST:PORT" in err
    assert not (tmp_path / "x").exists()


def test_without_prometheus_the_files_are_written_and_that_is_said(
    tmp_path, monkeypatch, capfd
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["up", str(tmp_path / "x")]) == 0
    assert "Prometheus is not on the PATH" in capfd.readouterr().err
    assert (tmp_path / "x/prometheus.yml").exists()


def test_the_wheel_carries_every_file_that_is_written() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    inside = {
        (Path(target) / path.relative_to(ROOT / source)).as_posix(): path
        for source, target in carried.items()
        for path in ([ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*"))
    }
    stack = up._stack()
    used = [
        *stack.glob("dashboards/*.json"), *stack.glob("prometheus/**/*.*"),
        *stack.glob("provisioning/*/*.yml"), stack / "rules/ddpprobe.yml",
    ]  # fmt: skip
    assert len(used) >= 6
    for path in used:
        assert inside[f"ddpprobe/stack/{path.relative_to(stack).as_posix()}"] == path


def test_prometheus_knows_the_daemon_and_the_rules_until_it_is_interrupted(tmp_path) -> None:
    said = tmp_path / "out"
    with said.open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from ddpprobe.cli import main; sys.exit(main())",
             "up", str(tmp_path / "stack"), "--json", "--target", "127.0.0.1:13399",
             "--listen", "127.0.0.1:0"],
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        until = prometheus_harness.until
        assert until(lambda: said.read_text().endswith("}\n") or process.poll() is not None, 60)
        assert process.poll() is None, said.read_text()
        facts: dict[str, Any] = json.loads(said.read_text())
        prometheus = object.__new__(prometheus_harness.Prometheus)
        prometheus.url = facts["url"]
        assert until(lambda: bool(prometheus.get("targets")["activeTargets"]), 60)
        (target,) = prometheus.get("targets")["activeTargets"]
        assert target["labels"] == {"instance": "127.0.0.1:13399", "job": "ddpprobe"}
        assert len(prometheus.get("rules")["groups"][0]["rules"]) == 7
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not prometheus.ready()
        text = (tmp_path / "stack/grafana/provisioning/datasources/ddpprobe.yml").read_text()
        assert yaml.safe_load(text)["datasources"][0]["url"] == facts["url"]
    finally:
        process.terminate()  # it takes its Prometheus along
        process.wait(60)
