"""The benchmark of detection is run in pieces, and says which ones are missing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.detection import __main__ as command
from benchmarks.detection.kept import Kept
from benchmarks.detection.report import page
from benchmarks.detection.results import Key, Result, Results, code
from benchmarks.detection.score import Outcome
from ddpprobe.records.step import Anomaly, FirstBad, StepRecord

FOUND = Outcome("F01", 0, 1, True, "dead_units", 3, None, True, (), ("loss_spike@7",))
RESULT = Result(FOUND, {"isnan": [4], "ZClip, z > 2.5": [], "7 sigma": [], "dead >= 0.7": [],
                       "reference, 9 rules": []},
                "now", "a machine", "2026-01-02")  # fmt: skip


def test_a_result_is_read_back_as_it_was_and_only_for_its_own_code(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    Results(file, "now").add(RESULT)
    other = Key("F01", 0, 10)
    again = Results(file, "now")
    assert again.of([RESULT.key, other]) == [RESULT]
    assert again.missing([RESULT.key, other]) == [other]
    later = Results(file, "later")
    assert (later.of([RESULT.key]), later.of_other_code) == ([], 1)


def test_half_a_line_of_a_killed_run_spoils_neither_what_is_before_nor_behind(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.jsonl"
    Results(file, "now").add(RESULT)
    whole = file.read_bytes()
    file.write_bytes(whole + whole.strip()[:50])
    behind = replace(RESULT, outcome=replace(FOUND, every=10))
    Results(file, "now").add(behind)
    keys = [RESULT.key, behind.key]
    assert Results(file, "now").of(keys) == [RESULT, behind]


def test_the_fingerprint_changes_with_the_probe_and_the_jobs_but_not_with_the_page(
    tmp_path: Path,
) -> None:
    jobs = tmp_path / "benchmarks" / "detection"
    for place in (tmp_path / "ddpprobe" / "detectors", jobs):
        place.mkdir(parents=True)
    files = [tmp_path / "ddpprobe" / "detectors" / "a.py", jobs / "faults.py", jobs / "report.py"]
    for file in files:
        file.write_text("1")
    seen = [code(tmp_path)]
    for file in files:
        file.write_text("2")
        seen.append(code(tmp_path))
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[2]


def test_the_page_names_what_is_missing_and_calls_nothing_found_that_was_not_run() -> None:
    text = page([RESULT], [Key("F01", 0, 10), Key("H03", 2, 1)])
    assert "2 of 3 runs are missing" in text
    assert "- seed 0, every=10: F01\n- seed 2, every=1: H03" in text
    row = next(line for line in text.splitlines() if line.startswith("| F01 "))
    assert row.endswith("| 1/1, +3 | not run | `dead_units` | - | 1/1 |")
    healthy = next(line for line in text.splitlines() if line.startswith("| H03 "))
    assert healthy.endswith("| not run | not run | not run |")
    assert "missing" not in page([RESULT], [])
    assert "of 0 runs" not in page([], [RESULT.key])  # a page of nothing can be made


def test_a_sitting_runs_what_has_no_result_and_keeps_none_of_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Key] = []

    def run_job(_zygote: object, key: Key, *_: object) -> tuple[Outcome, dict[str, list[int]]]:
        ran.append(key)
        if key.every == 10 and len(ran) == 2:
            raise command.RunFailed("F01 failed")
        return replace(FOUND, every=key.every), RESULT.spoke

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command, "Zygote", lambda **_: nullcontext())
    page_of = tmp_path / "page.md"
    asked = ["--jobs", "F01", "--seeds", "0", "--results", str(tmp_path / "r.jsonl"),
             "--out", str(page_of)]  # fmt: skip
    assert command.main([*asked, "--minutes", "0"]) == 0
    assert ran == []
    assert "2 of 2 runs are missing" in page_of.read_text()
    assert command.main(asked) == 1
    assert "1 of 2 runs are missing" in page_of.read_text()
    assert command.main(asked) == 0
    assert ran == [Key("F01", 0, 1), Key("F01", 0, 10), Key("F01", 0, 10)]
    assert "missing" not in page_of.read_text()
    assert "F01 failed" in capsys.readouterr().err


def test_no_result_is_kept_of_code_that_changed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(*_: object) -> tuple[Outcome, dict[str, list[int]]]:
        monkeypatch.setattr(command, "code", lambda **_: "edited")
        return FOUND, RESULT.spoke

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command, "Zygote", lambda **_: nullcontext())
    file = tmp_path / "r.jsonl"
    with pytest.raises(SystemExit, match="changed"):
        command.main(["--jobs", "F01", "--results", str(file)])
    assert not file.exists()


def test_the_fingerprint_of_what_is_recorded_leaves_out_detectors_and_their_judges(
    tmp_path: Path,
) -> None:
    jobs, probe = tmp_path / "benchmarks" / "detection", tmp_path / "ddpprobe"
    store = probe / "store"
    for place in (probe / "detectors", probe / "reader" / "live", probe / "rank", store, jobs):
        place.mkdir(parents=True)
    judging = [probe / "detectors" / "a.py", probe / "reader" / "live" / "a.py",
               jobs / "score.py", jobs / "rivals.py", store / "earlier_attempts.py"]  # fmt: skip
    recording = [probe / "b.py", probe / "rank" / "reader.py", jobs / "faults.py",
                 store / "writer.py"]  # fmt: skip
    for file in judging + recording:
        file.write_text("1")
    first = code(tmp_path, recorded=True)
    for file in judging:
        file.write_text("2")
    assert code(tmp_path, recorded=True) == first
    for file in recording:
        file.write_text("2")
        assert code(tmp_path, recorded=True) != first
        first = code(tmp_path, recorded=True)


def test_a_run_whose_records_are_kept_is_judged_by_the_detectors_of_now(tmp_path: Path) -> None:
    key, bad = Key("N01", 0, 1), FirstBad(7, 0, "forward", 0, 1, "fc", "output", "", 1, 0, 0, 8)
    records = [StepRecord(0, s, (0, 1), s, first_bad=bad if s == 7 else None) for s in range(9)]
    lost = Anomaly("rank_lost", "page", 8, 0, 1, None, None, "step", False, "", {}, sampled=True)
    kept = Kept(tmp_path, "now")
    assert kept.judged(key) is None
    kept.keep(key, records, [lost, replace(lost, detector="nonfinite", step=3)])
    read, said = Kept(tmp_path, "now").judged(key)
    assert [record.step for record in read] == list(range(9))
    assert [(one.detector, one.step) for one in said] == [("nonfinite", 7), ("rank_lost", 8)]
    assert Kept(tmp_path, "later").judged(key) is None  # it was recorded by other code
    assert Kept(tmp_path, "now").judged(key) is None  # and is gone then
    assert not list(tmp_path.rglob("*.gz"))


def test_a_run_that_is_kept_is_not_run_again(tmp_path: Path, monkeypatch) -> None:
    ran: list[Key] = []
    monkeypatch.setattr(command, "_run", lambda _, key, __: ran.append(key) or ([], []))
    for _ in range(2):
        found, _spoke = command.run_job(None, Key("H01", 0, 1), tmp_path, Kept(tmp_path, "now"))
        assert (found.job, found.pages) == ("H01", ())
    assert ran == [Key("H01", 0, 1)]
