"""The benchmark of detection is run in pieces, and says which ones are missing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.detection import __main__ as command
from benchmarks.detection.fingerprint import Fingerprints
from benchmarks.detection.jobs import JOBS
from benchmarks.detection.kept import Kept
from benchmarks.detection.report import page
from benchmarks.detection.results import Key, Result, Results
from benchmarks.detection.score import Outcome
from ddpprobe.records.step import Anomaly, FirstBad, StepRecord

FOUND = Outcome("F01", 0, 1, True, "dead_units", 3, None, True, (), ("loss_spike@7",))
RESULT = Result(FOUND, {"isnan": [4], "ZClip, z > 2.5": [], "7 sigma": [], "dead >= 0.7": [],
                       "reference, 9 rules": []},
                "now", "a machine", "2026-01-02")  # fmt: skip


def _now(_job: str) -> str:
    return "now"


def test_a_result_is_read_back_as_it_was_and_only_for_its_own_code(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    Results(file, _now).add(RESULT)
    other = Key("F01", 0, 10)
    again = Results(file, _now)
    assert again.of([RESULT.key, other]) == [RESULT]
    assert again.missing([RESULT.key, other]) == [other]
    later = Results(file, lambda _: "later")
    assert (later.of([RESULT.key]), later.of_other_code) == ([], 1)


def test_half_a_line_of_a_killed_run_spoils_neither_what_is_before_nor_behind(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.jsonl"
    Results(file, _now).add(RESULT)
    whole = file.read_bytes()
    file.write_bytes(whole + whole.strip()[:50])
    behind = replace(RESULT, outcome=replace(FOUND, every=10))
    Results(file, _now).add(behind)
    keys = [RESULT.key, behind.key]
    assert Results(file, _now).of(keys) == [RESULT, behind]


PROBE = ("b.py", "rank/reader.py", "store/writer.py")
NO_ROWS = ("detectors/a.py", "reader/live/a.py", "store/earlier_attempts.py")
SETS = {
    "faults": "from benchmarks.detection import nets\n", "nets": "import torch\n",
    "set_e": "from benchmarks.detection.faults import Fault\n", "set_l": "import torch\n",
    "ranks": "from benchmarks.detection.jobs import JOBS\n", "jobs": "",
    "reference": "", "rivals": "", "score": "", "report": "", "results": "",
}  # fmt: skip
CHANGED = {  # a file -> whether the records of a job of set_e depend on it, whether its result does
    **dict.fromkeys((f"ddpprobe/{name}" for name in PROBE), (True, True)),
    **dict.fromkeys((f"ddpprobe/{name}" for name in NO_ROWS), (False, True)),
    **{f"benchmarks/detection/{name}.py": (True, True) for name in ("set_e", "faults", "nets")},
    **{f"benchmarks/detection/{name}.py": (False, True) for name in ("score", "rivals")},
    **{f"benchmarks/detection/{name}.py": (False, False) for name in ("set_l", "jobs", "report")},
    "benchmarks/detection/ranks.py": (True, True), "benchmarks/zoo.txt": (True, True),
}  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED)
def test_the_fingerprint_of_a_job_changes_with_what_it_depends_on_alone(
    tmp_path: Path, changed: str
) -> None:
    texts = {f"benchmarks/detection/{name}.py": text for name, text in SETS.items()}
    texts.update({f"ddpprobe/{name}": "" for name in PROBE + NO_ROWS}, **{"benchmarks/zoo.txt": ""})
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    job = next(name for name, job in JOBS.items() if job.__module__.endswith("set_e"))
    before, again = Fingerprints(tmp_path), Fingerprints(tmp_path)
    of = (before.of_records(job), before.of_result(job))
    assert (again.of_records(job), again.of_result(job)) == of
    (tmp_path / changed).write_text(texts[changed] + "# another one\n")
    after = Fingerprints(tmp_path)
    differs = (after.of_records(job) != of[0], after.of_result(job) != of[1])
    assert differs == CHANGED[changed]
    assert (before.of_records(job), before.of_result(job)) == of  # as the code was


def test_every_job_has_a_fingerprint_and_one_set_does_not_depend_on_another() -> None:
    code = Fingerprints()
    assert all(code.of_records(job) != code.of_result(job) for job in JOBS)
    of_set = {job.__module__: code.of_result(name) for name, job in JOBS.items()}
    assert len(set(of_set.values())) == len(of_set) > 20


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
        edited = SimpleNamespace(of_result=lambda _: "edited")
        monkeypatch.setattr(command, "Fingerprints", lambda: edited)
        return FOUND, RESULT.spoke

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command, "Zygote", lambda **_: nullcontext())
    file = tmp_path / "r.jsonl"
    with pytest.raises(SystemExit, match="changed"):
        command.main(["--jobs", "F01", "--results", str(file)])
    assert not file.exists()


def test_a_run_whose_records_are_kept_is_judged_by_the_detectors_of_now(tmp_path: Path) -> None:
    key, bad = Key("N01", 0, 1), FirstBad(7, 0, "forward", 0, 1, "fc", "output", "", 1, 0, 0, 8)
    records = [StepRecord(0, s, (0, 1), s, first_bad=bad if s == 7 else None) for s in range(9)]
    lost = Anomaly("rank_lost", "page", 8, 0, 1, None, None, "step", False, "", {}, sampled=True)
    kept = Kept(tmp_path, _now)
    assert kept.judged(key) is None
    kept.keep(key, records, [lost, replace(lost, detector="nonfinite", step=3)])
    read, said = Kept(tmp_path, _now).judged(key)
    assert [record.step for record in read] == list(range(9))
    assert [(one.detector, one.step) for one in said] == [("nonfinite", 7), ("rank_lost", 8)]
    assert Kept(tmp_path, lambda _: "later").judged(key) is None  # it was recorded by other code
    kept.keep(Key("N01", 0, 10), records, [])
    Kept(tmp_path, lambda _: "later").keep(key, records, [])
    assert Kept(tmp_path, _now).judged(key) is None  # and is gone when there is a newer one
    assert len(list(tmp_path.iterdir())) == 2  # the other interval is another run


def test_a_run_that_is_kept_is_not_run_again(tmp_path: Path, monkeypatch) -> None:
    ran: list[Key] = []
    monkeypatch.setattr(command, "record", lambda _, key, __: ran.append(key) or ([], []))
    for _ in range(2):
        found, _spoke = command.run_job(None, Key("H01", 0, 1), tmp_path, Kept(tmp_path, _now))
        assert (found.job, found.pages) == ("H01", ())
    assert ran == [Key("H01", 0, 1)]
