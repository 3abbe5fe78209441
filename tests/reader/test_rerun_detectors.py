"""The stored records give the live verdict again, and another one with other settings."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddpprobe.cli.main import main
from ddpprobe.detectors.settings import defaults
from ddpprobe.detectors.suite import DETECTORS, default_suite
from ddpprobe.reader.rerun_detectors import rerun
from ddpprobe.reader.run import open_run
from ddpprobe.rundir import framing
from ddpprobe.store.writer import StoreWriter
from tests.made_runs import NODE, Made, bad, head_merge, record

STEPS, SPIKE, NAN = 60, 40, 50


def watched_run(path: Path, ranks: int = 2) -> Path:
    """A run as a daemon watched it: a spike, a NaN ten steps later, verdicts written down."""
    made, suite = Made(path, ranks), default_suite()
    noise = np.random.default_rng(0).normal(0, 0.02, (STEPS, ranks))
    for step in range(STEPS):
        parts = []
        for rank in range(ranks):
            one = record(rank, step)
            norm = math.exp(noise[step, rank]) * (50.0 if step == SPIKE else 1.0)
            scalars = {rank: {"loss": 1.0, "grad_norm": norm, "grad_norm_local": norm}}
            one = replace(one, scalars=scalars)
            parts.append(replace(one, first_bad=bad(1, NAN)) if (step, rank) == (NAN, 1) else one)
        made.write(parts)
        merged = head_merge(parts)
        made.tell(framing.RECORD, merged)
        for anomaly in suite.update(merged):
            made.tell(framing.ANOMALY, anomaly)
    run = made.close()
    with_store = StoreWriter(run, NODE, block=16, durable=False)
    with_store.fold()
    with_store.close()
    return path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched_run(tmp_path_factory.mktemp("runs") / "watched")


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]):
    """`replay(*words)`: (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["replay", *map(str, words)])
        return (code, *capsys.readouterr())

    return run


def test_with_the_same_settings_the_verdict_is_the_recorded_one_bit_for_bit(watched: Path) -> None:
    found = rerun(open_run(watched))
    assert found.identical
    assert [(v.change, v.anomaly.detector, v.anomaly.step) for v in found.verdicts] == [
        ("same", "nonfinite", NAN), ("same", "grad_spike", SPIKE)
    ]  # fmt: skip
    assert rerun(open_run(watched), {d.name: defaults(d) for d in DETECTORS}).identical


def test_other_settings_show_what_is_new_and_what_is_gone(watched: Path, replay) -> None:
    words = ("--detector", "grad_spike", "--set", "repeats=1", "--set", "z=6")
    code, out, err = replay(watched, *words, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["settings"] == {"grad_spike": {"repeats": 1, "z": 6.0}}
    assert (told["new"], told["gone"], told["same"], told["identical"]) == (1, 1, 1, False)
    shown = [(v["change"], v["detector"], v["level"], v["first_cause"]) for v in told["verdicts"]]
    assert shown == [
        ("new", "grad_spike", "page", True), ("same", "nonfinite", "page", True),
        ("gone", "grad_spike", "warn", False),
    ]  # fmt: skip
    code, out, _ = replay(watched, "--detector", "grad_spike", "--set", "ratio=1000")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["same", "gone"]
    assert lines[-1] == "0 new, 1 gone, 1 same with grad_spike ratio=1000.0"


def test_without_settings_the_last_line_says_that_nothing_changed(watched: Path, replay) -> None:
    code, out, _ = replay(watched)
    assert code == 0
    assert out.splitlines()[-1] == (
        "0 new, 0 gone, 2 same with the settings of every run; the recorded verdict exactly"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--detector", "grad"), "no detector 'grad': choose one of grad_spike, "),
        (("--detector", "desync", "--set", "z=1"), "desync has no setting 'z'; it has quiet_steps"),
        (("--detector", "desync", "--set", "z"), "'z': expected key=value"),
        (("--detector", "desync", "--set", "quiet_steps=1.5"), "expected a whole number"),
        (("--detector", "desync", "--set", "quiet_steps=-1"), "expected a number from 0"),
        (("--detector", "grad_spike", "--set", "z=nan"), "z=nan: expected a number above 0"),
        (("--detector", "grad_spike", "--set", "window=8"), "window=8: expected a number from 12"),
        (("--detector", "coverage", "--set", "steady=9999"), "expected a number up to 8192"),
        (("--set", "z=1"), "Give --detector NAME before it"),
        (("--detector", "desync", "--step", 3), "one at a time"),
        (("--step", 3), "give --module and --build as well"),
    ],
)
def test_wrong_use_is_told_what_there_is(watched: Path, replay, words, says: str) -> None:
    code, out, err = replay(watched, *words)
    assert (code, out) == (2, "")
    assert says in err


def test_every_setting_is_listed_with_its_default_and_changes_something(replay) -> None:
    code, out, _ = replay("--list", "--json")
    listed = json.loads(out)["detectors"]
    assert code == 0
    assert {name: told["settings"] for name, told in listed.items()} == {
        d.name: defaults(d) for d in DETECTORS
    }
    assert all(told["says"] and told["settings"] for told in listed.values())
    plain = replay("--list")[1]
    for name, told in listed.items():
        assert f"{name}: " in plain
        assert all(f"{key} " in plain for key in told["settings"])


def test_a_run_without_a_daemon_is_judged_as_often_as_one_likes(tmp_path: Path) -> None:
    made = Made(tmp_path).whole(10, told=False)
    made.close(cleanly=False)
    assert rerun(open_run(tmp_path)).identical


def test_a_damaged_store_is_replayed_as_far_as_it_goes_and_exits_with_3(
    watched: Path, tmp_path: Path, replay
) -> None:
    path = shutil.copytree(watched, tmp_path / "run")
    chunk = path / "run.zarr" / "attempt_000" / "merged" / "scalars" / "c" / "0" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    code, _, err = replay(path)
    assert code == 3
    assert "lost" in err


def test_without_torch_the_detectors_are_asked_and_a_module_is_refused(
    watched: Path, replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [n for n in sys.modules if n.startswith("ddpprobe.reader.reexecute.module")]:
        monkeypatch.delitem(sys.modules, name)
    assert replay(watched)[0] == 0
    code, out, err = replay(watched, "--step", 3, "--module", "mlp", "--build", "a:b")
    assert (code, out) == (2, "")
    assert err == (
        "ddpprobe: executing a module again needs torch: pip install 'ddpprobe[train]'\n"
    )
