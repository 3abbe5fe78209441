"""`ddpprobe up`: what it writes is valid, nobody's work is lost, and Prometheus runs on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml

from ddpprobe.cli import stack_files, stack_process
from ddpprobe.cli.main import main
from ddpprobe.rundir import paths

from ... import prometheus_harness
from ...prometheus_harness import until
from ...waiting import is_gone

ROOT = Path(__file__).parents[3]
BOARDS = sorted((ROOT / "grafana/dashboards").glob("*.json"))
COMMAND = [sys.executable, "-m", "ddpprobe", "up"]
Call = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(autouse=True)
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where daemons announce themselves, for the commands of a test."""
    directory = tmp_path / "announced"
    directory.mkdir()
    monkeypatch.setenv("DDPPROBE_SD_DIR", str(directory))
    return directory


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run one command line; return its exit code, its JSON ({} for none) and its stderr."""

    def do(*words: object) -> tuple[int, dict[str, Any], str]:
        code = main(["up", *map(str, words), "--json"])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else {}, err

    return do


@pytest.fixture
def write(call: Call) -> Call:
    """Only write the files."""
    return lambda *words: call(*words, "--no-start")


def tool(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def annotations(rules: Path, name: str) -> list[str]:
    """Return one annotation of each alert."""
    groups = yaml.safe_load(rules.read_text())["groups"]
    return [r["annotations"][name] for g in groups for r in g["rules"] if "alert" in r]


# ---- what is written


def test_what_it_writes_is_what_prometheus_and_grafana_take(write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, facts, err = write(
        "--listen", "0.0.0.0:9999", "--target", "n1:13377", "--target", "[::1]:1"
    )
    here = tmp_path / "ddpprobe-stack"
    assert (code, err) == (0, "")
    assert set(facts["files"].values()) == {"written"}
    tool("promtool", "check", "config", here / "prometheus.yml")
    tool("promtool", "check", "rules", "--lint=all", "--lint-fatal", here / "rules/ddpprobe.yml")
    tool("amtool", "check-config", here / "alertmanager.yml")
    assert yaml.safe_load((here / "targets/ddpprobe.json").read_text()) == [
        {"targets": ["n1:13377", "[::1]:1"], "labels": {}}
    ]
    (source,) = yaml.safe_load(
        (here / "grafana/provisioning/datasources/ddpprobe.yml").read_text()
    )["datasources"]
    assert source["url"] == f"http://{os.uname().nodename}:9999"
    (provider,) = yaml.safe_load(
        (here / "grafana/provisioning/dashboards/ddpprobe.yml").read_text()
    )["providers"]
    assert provider["options"]["path"] == str(here / "grafana/dashboards")
    assert len(BOARDS) == 4
    base = f"{facts['runbooks']}/"
    for board in BOARDS:  # with links to the runbooks that Prometheus serves
        text = board.read_text().replace('"url": "docs/runbooks/', f'"url": "{base}')
        assert (here / "grafana/dashboards" / board.name).read_text() == text


def test_what_daemons_announce_is_scraped_and_no_port_is_guessed(
    write, tmp_path, announced, monkeypatch
) -> None:
    stack = tmp_path / "stack"

    def files() -> list[str]:
        (job,) = yaml.safe_load((stack / "prometheus.yml").read_text())["scrape_configs"]
        (found,) = job["file_sd_configs"]
        return found["files"]

    assert write(stack)[1]["notes"] == []
    assert json.loads((stack / "targets/ddpprobe.json").read_text()) == []
    assert f"{announced}/*.json" in files()
    assert f"{stack}/targets/*.json" in files()
    monkeypatch.setenv("DDPPROBE_SD_DIR", "")
    _, facts, err = write(stack)
    assert files() == [f"{stack}/targets/*.json"]
    assert len(facts["notes"]) == 1
    assert "nothing is scraped" in err
    assert write(stack, "--target", "a:1")[1]["notes"] == []


def test_a_changed_file_is_kept_and_one_of_ours_is_updated(write, tmp_path) -> None:
    write(tmp_path)
    mine, ours = tmp_path / "prometheus.yml", tmp_path / "rules/ddpprobe.yml"
    before = ours.read_bytes()
    mine.write_text("global: {}\n")
    ours.write_text("groups: [] # of an older version\n")
    written = json.loads((tmp_path / stack_files.WRITTEN).read_text())
    written["rules/ddpprobe.yml"] = stack_files.checksum(ours.read_bytes())
    (tmp_path / stack_files.WRITTEN).write_text(json.dumps(written))
    _, facts, err = write(tmp_path)
    files = facts["files"]
    assert files.pop("prometheus.yml") == "kept"
    assert files.pop("rules/ddpprobe.yml") == "updated"
    assert set(files.values()) == {"unchanged"}
    assert mine.read_text() == "global: {}\n"
    assert ours.read_bytes() == before
    assert "you have changed prometheus.yml: kept; --force overwrites" in err
    assert "your prometheus.yml does not name the Alertmanager at 127.0.0.1:9093" in err
    assert write(tmp_path, "--force")[1]["files"]["prometheus.yml"] == "updated"
    assert "scrape_configs" in mine.read_text()


def test_a_file_that_was_there_before_is_nobody_s_to_overwrite(write, tmp_path) -> None:
    (tmp_path / "prometheus.yml").write_text("mine")
    (tmp_path / stack_files.WRITTEN).write_text('["nonsense"]')
    assert write(tmp_path)[1]["files"]["prometheus.yml"] == "kept"
    assert (tmp_path / "prometheus.yml").read_text() == "mine"


def test_the_webhook_is_notified_and_its_url_is_kept_to_oneself(write, tmp_path) -> None:
    url = 'https://me:key@hooks.example:8443/key?"quoted"'
    _, facts, err = write(tmp_path, "--webhook", url)
    receiver, *_ = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())["receivers"]
    assert receiver["webhook_configs"] == [{"url": url}]
    tool("amtool", "check-config", tmp_path / "alertmanager.yml")
    assert "key" not in json.dumps(facts) + err
    assert facts["notifies"] == "https://hooks.example:8443"
    for name in ("alertmanager.yml", stack_files.OPTIONS):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_another_alertmanager_is_told_by_its_url(write, tmp_path) -> None:
    write(tmp_path, "--alertmanager", "https://am.example:8443/prefix")
    (known,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["alerting"][
        "alertmanagers"
    ]
    assert known == {
        "scheme": "https",
        "path_prefix": "/prefix",
        "static_configs": [{"targets": ["am.example:8443"]}],
    }
    tool("promtool", "check", "config", tmp_path / "prometheus.yml")


def test_every_runbook_that_an_alert_names_is_there(write, tmp_path) -> None:
    rules = tmp_path / "rules/ddpprobe.yml"
    write(tmp_path)
    for link in annotations(rules, "runbook_url"):
        with urllib.request.urlopen(link) as page:  # a file of this directory
            assert page.read().startswith(b"# Ddpprobe")
    write(tmp_path, "--runbook-base", "https://wiki.example/runbooks/")
    for link in annotations(rules, "runbook_url"):
        name = link.removeprefix("https://wiki.example/runbooks/")
        assert (tmp_path / "runbooks" / name).is_file()


def test_the_alerts_lead_to_the_dashboard_of_the_grafana_that_there_is(write, tmp_path) -> None:
    rules = tmp_path / "rules/ddpprobe.yml"
    uid = "ddpprobe-run"
    assert uid in {json.loads(board.read_text())["uid"] for board in BOARDS}
    for words, grafana in (
        ((), "http://localhost:3000"),
        (("--grafana-url", "https://grafana.example/team/"), "https://grafana.example/team"),
    ):
        write(tmp_path, *words)
        for link in annotations(rules, "dashboard_url"):
            assert link.startswith(f"{grafana}/d/{uid}?var-job=")
        tool("promtool", "check", "rules", rules)


# ---- options


def test_options_are_those_of_last_time_until_they_are_taken_back(write, tmp_path, capfd) -> None:
    def written() -> tuple[Any, Any]:
        receiver, *_ = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())["receivers"]
        return receiver["webhook_configs"], json.loads(
            (tmp_path / "targets/ddpprobe.json").read_text()
        )

    hook, group = [{"url": "http://h/key"}], [{"targets": ["a:1"], "labels": {}}]
    write(tmp_path, "--webhook", "http://h/key", "--target", "a:1", "--listen", "[::1]:9099")
    write(tmp_path)
    assert written() == (hook, group)
    write(tmp_path, "--target", "")
    assert written() == (hook, [])
    assert main(["up", str(tmp_path), "--no-start"]) == 0
    out, _ = capfd.readouterr()
    assert "as last time: --listen [::1]:9099, --webhook http://h\n" in out
    write(tmp_path, "--webhook", "")
    assert written() == ([], [])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--target", "13377"), "expected the HOST:PORT of a daemon"),
        (("--listen", "here:port"), "write HOST:PORT"),
        (("--webhook", "hooks.example/key"), "--webhook: expected http://HOST"),
        (("--webhook", "http://me:key"), "--webhook: expected http://HOST"),
        (("--alertmanager", "ftp://a"), "--alertmanager: expected http://HOST"),
        (("--runbook-base", "http://a b"), "--runbook-base: expected http://HOST"),
        (("--webhook", "http://a", "--alertmanager", "http://b"), "receivers of its own"),
        (("--webhook", "http://a", "--prometheus", "http://b"), "an Alertmanager of its own"),
        (("--prometheus", "http://a", "--alertmanager", "http://b"), "that one knows its own"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(write, tmp_path, words, why) -> None:
    code, _, err = write(tmp_path / "x", *words)
    assert code == 2
    assert why in err
    assert not (tmp_path / "x").exists()


def test_of_another_prometheus_it_is_said_how_it_loads_the_files(tmp_path, capfd) -> None:
    stack = tmp_path / "stack"
    assert main(["up", str(stack), "--prometheus", "http://p.example:9090"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert f"{stack}/rules/ddpprobe.yml to rule_files of the Prometheus at http://p.example" in out
    assert "curl -X POST http://p.example:9090/-/reload" in out
    assert not (stack / "data").exists()
    assert main(["up", str(stack), "--detach"]) == 2
    assert "--detach is for what is started" in capfd.readouterr().err


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
    stack = stack_files._stack()
    used = [
        *stack.glob("dashboards/*.json"), *stack.glob("prometheus/**/*.*"),
        *stack.glob("provisioning/*/*.yml"), stack / "rules/ddpprobe.yml",
        stack / "alertmanager/alertmanager.yml",
    ]  # fmt: skip
    assert len(used) >= 7
    for path in used:
        assert inside[f"ddpprobe/stack/{path.relative_to(stack).as_posix()}"] == path
    pages = list(stack_files._runbooks(stack).glob("*.md"))
    assert len(pages) >= 7
    for page in pages:
        assert inside[f"ddpprobe/stack/runbooks/{page.name}"] == page


# ---- what runs


@pytest.fixture
def typed() -> Call:
    """Do the same as `call` in a process of its own, as what goes on after it must be."""

    def do(*words: object) -> tuple[int, dict[str, Any], str]:
        done = subprocess.run(
            [*COMMAND, *map(str, words), "--json"], capture_output=True, text=True, check=False
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr

    return do


def family(pid: int) -> list[psutil.Process]:
    """Return the servers that a process has started."""
    return psutil.Process(pid).children(recursive=True)


def ended(servers: list[psutil.Process]) -> bool:
    """Wait until processes are gone."""
    return until(lambda: all(map(is_gone, servers)), 60)


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def silence(alertmanager: str) -> str:
    """Silence an alert; return the id of the silence."""
    body = {
        "matchers": [{"name": "job", "value": "x", "isRegex": False, "isEqual": True}],
        "startsAt": "2026-01-01T00:00:00Z", "endsAt": "2126-01-01T00:00:00Z",
        "createdBy": "a test", "comment": "-",
    }  # fmt: skip
    request = urllib.request.Request(
        f"{alertmanager}/api/v2/silences",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["silenceID"])


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Path]:
    """A directory of which nothing is left running."""
    directory = tmp_path / "stack"
    yield directory
    if directory.exists():
        stack_process.stop(directory)


def test_in_the_background_it_watches_what_is_announced_until_it_is_stopped(
    typed, stack, announced
) -> None:
    code, facts, err = typed(stack, "--detach", "--listen", "127.0.0.1:0")
    assert (code, err) == (0, "")
    assert typed(stack, "--listen", "127.0.0.1:0")[2].count("it runs in") == 1
    prometheus = object.__new__(prometheus_harness.Prometheus)
    prometheus.url = facts["url"]

    (announced / "one.json").write_text(
        json.dumps([{"targets": ["127.0.0.1:9"], "labels": {"run": "gpt-1a2b"}}])
    )
    assert until(lambda: bool(prometheus.get("targets")["activeTargets"]), 60)
    (target,) = prometheus.get("targets")["activeTargets"]
    assert target["labels"] == {"instance": "127.0.0.1:9", "job": "ddpprobe", "run": "gpt-1a2b"}
    known = prometheus.get("alertmanagers")["activeAlertmanagers"]
    assert [urlsplit(each["url"]).netloc for each in known] == [
        urlsplit(facts["alertmanager"]).netloc
    ]
    for link in annotations(stack / "rules/ddpprobe.yml", "runbook_url"):
        assert link.startswith(facts["url"])
        with urllib.request.urlopen(link, timeout=30) as page:
            assert page.headers["Content-Type"].startswith("text/")
            assert page.read().startswith(b"# Ddpprobe")
    code, status, _ = typed(stack, "--status")
    assert (code, status["running"], status["url"]) == (0, True, facts["url"])
    assert sum(status["watched"]["targets"].values()) == 1
    assert status["watched"]["alerts"] == []

    quiet = silence(facts["alertmanager"])
    assert until(lambda: bool(prometheus.now("up")), 60)
    started = time.time()
    servers = family(status["pid"])
    assert len(servers) == 2
    assert typed(stack, "--stop")[1]["stopped"] is True
    assert ended(servers)
    assert typed(stack, "--status")[:2] == (
        2,
        {"format_version": 1, "directory": str(stack), "running": False},
    )
    assert typed(stack, "--stop")[1]["stopped"] is False

    _, again, _ = typed(stack, "--detach")  # as last time
    assert [s["id"] for s in asked(f"{again['alertmanager']}/api/v2/silences")] == [quiet]
    prometheus.url = again["url"]
    assert prometheus.get("query", query="up", time=str(started))["result"]

    # Killed, it takes its servers along, and does not keep the next one from starting.
    servers = family(again["pid"])
    assert len(servers) == 2
    os.kill(again["pid"], signal.SIGKILL)
    assert typed(stack, "--detach")[0] == 0
    assert ended(servers)


def test_in_the_foreground_ctrl_c_ends_all_of_it(stack, tmp_path) -> None:
    said = tmp_path / "out"
    with said.open("w+") as out:
        process = subprocess.Popen(
            [*COMMAND, str(stack), "--json", "--listen", "127.0.0.1:0"],
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        assert until(lambda: said.read_text().endswith("}\n") or process.poll() is not None, 60)
        assert process.poll() is None, said.read_text()
        facts: dict[str, Any] = json.loads(said.read_text())
        text = (stack / "grafana/provisioning/datasources/ddpprobe.yml").read_text()
        assert yaml.safe_load(text)["datasources"][0]["url"] == facts["url"]
        servers = family(process.pid)
        assert len(servers) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert ended(servers)
        assert not paths.is_locked(stack / stack_process.LOCK)
    finally:
        process.terminate()
        process.wait(60)


def test_a_server_that_refuses_its_file_is_quoted_and_the_other_ended(typed, stack) -> None:
    typed(stack, "--no-start")
    (stack / "prometheus.yml").write_text("nonsense: {}\n")
    code, facts, err = typed(stack, "--detach", "--listen", "127.0.0.1:0")
    assert (code, facts) == (2, {})
    assert "Prometheus ended with 2: " in err
    assert "nonsense" in err
    assert stack_process.running(stack) is None


def test_without_an_alertmanager_it_is_said_that_alerts_reach_nobody(
    typed, stack, tmp_path, monkeypatch
) -> None:
    import shutil

    for name in ("prometheus", "sh"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    _, facts, err = typed(stack, "--detach", "--listen", "127.0.0.1:0")
    assert facts["alertmanager"] is None
    assert "alerts reach nobody" in err
    typed(stack, "--stop")
    code, _, err = typed(stack, "--webhook", "http://127.0.0.1:9/")
    assert code == 2
    assert "Alertmanager is not on the PATH" in err
