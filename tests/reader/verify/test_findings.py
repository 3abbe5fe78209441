"""What `verify` finds is said with its place and its reason, and how far it is, is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify import verify as module
from ddpprobe.reader.verify.report import MOST_DAMAGE, VerifyReport
from ddpprobe.reader.verify.verify import fault_of_frame, verify, work
from ddpprobe.rundir import framing
from ddpprobe.store.manifest import Lost, Manifest
from ddpprobe.store.writer import StoreWriter

from ...made_runs import ANOMALY, NODE, Made, record

GROUP = "attempt_000/rank_00000"
CHUNK = "counts/c/0/0/0"


def fold(made: Made, *, seal: bool = True) -> None:
    folder = StoreWriter(made.run, NODE, block=4, durable=False)
    _ = folder.seal() if seal else folder.fold()
    folder.close()


def make(path: Path, steps: int = 6, segment_frames: int = 8) -> Made:
    made = Made(path, ranks=1, segment_frames=segment_frames)
    made.write(record(0, step) for step in range(steps))
    for step in range(steps):
        made.tell(framing.SAMPLE, {"time_ns": step, "host": {"cpu": 0.5}, "ranks": {}})
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("model") / "run")
    made.close()
    fold(made)
    return made.path


@pytest.fixture
def sealed(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "run")
    return tmp_path / "run"


def found(path: Path) -> list[tuple[str, str]]:
    return [(lost.where, lost.why) for lost in verify(open_run(path)).damage]


def test_files_that_differ_from_what_was_committed_are_named_with_what_differs(
    sealed: Path,
) -> None:
    path, where = sealed / "run.zarr" / GROUP / CHUNK, f"run.zarr/{GROUP}/{CHUNK}"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    told = f"{len(data) - 1} bytes where {len(data)} were committed"
    assert (where, told) in found(sealed)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert (where, "other bytes than were committed") in found(sealed)
    path.unlink()
    assert (where, "missing") in found(sealed)
    path.mkdir()
    assert (where, f"no regular file ({CHUNK} is not a regular file)") in found(sealed)
    path.rmdir()
    path.write_bytes(data)
    assert found(sealed) == []


def test_a_link_in_the_place_of_a_group_is_not_followed(sealed: Path, tmp_path: Path) -> None:
    group = sealed / "run.zarr" / GROUP
    group.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "more").write_text("x")
    group.symlink_to(tmp_path / "elsewhere")
    report = verify(open_run(sealed))
    assert report.damage
    assert not any("never committed" in note for note in report.notes)


def test_a_lost_manifest_is_damage_but_for_a_fold_that_did_not_come_to_its_first_commit(
    sealed: Path,
) -> None:
    log = next(p for p in (sealed / "manifest").iterdir() if "rank_00000" in p.name)
    log.unlink()
    assert (f"run.zarr/{GROUP}", "its manifest is missing") in found(sealed)
    group = sealed / "run.zarr" / GROUP
    (group / "zarr.json").unlink()
    for path in [p for p in group.rglob("*") if p.is_file()][3:]:
        path.unlink()
    assert f"run.zarr/{GROUP}: 3 files of a fold that was interrupted" in (
        verify(open_run(sealed)).notes
    )


def test_a_line_of_a_manifest_that_is_damaged_is_told_as_the_manifests(sealed: Path) -> None:
    log = next(p for p in (sealed / "manifest").iterdir() if "rank_00000" in p.name)
    lines = log.read_bytes().splitlines(keepends=True)
    name = str(log.relative_to(sealed))
    log.write_bytes(b"".join(lines) + b'{"half')
    report = verify(open_run(sealed))
    assert report.ok
    assert report.notes == [f"{name}: 6 bytes of a line that was not finished"]
    log.write_bytes(lines[0].replace(b'"', b"'", 1) + b"".join(lines[1:]))
    told = [why for where, why in found(sealed) if where == name]
    assert told == list(Manifest(log).damage)
    assert told
    assert not any("never committed" in note for note in verify(open_run(sealed)).notes)


def test_files_that_were_never_committed_are_a_note(sealed: Path) -> None:
    group = sealed / "run.zarr" / GROUP
    for name in ("counts/c/9", "stray"):
        (group / name).write_text("x")
    (sealed / "run.zarr" / "odd").write_text("x")
    report = verify(open_run(sealed))
    assert report.ok
    assert sorted(report.notes) == [
        "run.zarr/attempt_000/rank_00000: 2 files that were never committed",
        "run.zarr: 1 files that were never committed",
    ]


def test_files_that_were_committed_or_taken_away_while_we_looked_are_no_note(sealed: Path) -> None:
    root, log = sealed / "run.zarr" / GROUP, _log(sealed)
    (root / "stray").write_text("x")
    assert module._still_unknown(root, log, {CHUNK, "stray", "gone"}) == {"stray"}


def test_a_file_that_was_wrong_before_the_last_commit_is_looked_at_again(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer commits while a live run is checked: what was wrong by then may be right now."""
    looks: list[Any] = []
    real = module._wrong_files

    def wrong(root: Path, manifest: Manifest, only: Any = None) -> dict[str, str]:
        looks.append(only and set(only))
        return {"zarr.json": "by then"} if only is None else real(root, manifest, only)

    same = iter([False, True, True])
    monkeypatch.setattr(module, "_wrong_files", wrong)
    monkeypatch.setattr(module, "_says_the_same", lambda *_: next(same))
    report = VerifyReport()
    module._check_files(module.paths.RunDir(sealed), GROUP, report)
    assert (report.damage, looks) == ([], [None, {"zarr.json"}])
    assert report.files == len(Manifest(_log(sealed)).state.files)


def _log(run: Path) -> Path:
    return next(p for p in (run / "manifest").iterdir() if "rank_00000" in p.name)


def test_only_the_files_asked_for_are_looked_at(sealed: Path) -> None:
    root, manifest = sealed / "run.zarr" / GROUP, Manifest(_log(sealed))
    for name in (CHUNK, "zarr.json"):
        (root / name).unlink()
    assert module._wrong_files(root, manifest, {CHUNK})[CHUNK] == "missing"
    assert "step/zarr.json" not in module._wrong_files(root, manifest, {CHUNK})
    (root / "step" / "zarr.json").unlink()
    assert "step/zarr.json" not in module._wrong_files(root, manifest, {CHUNK})
    assert module._wrong_files(root, manifest)["step/zarr.json"] == "missing"


@pytest.mark.parametrize("folded", [False, True])
def test_as_many_units_are_told_as_there_is_work(folded: bool, tmp_path: Path) -> None:
    made = make(tmp_path / "run", steps=20)
    if folded:
        fold(made, seal=False)
    made.close()
    done: list[int] = []
    run = open_run(made.path)
    report = verify(run, done.append)
    assert sum(done) == work(run) >= 6
    assert report.ok


def test_without_its_identity_a_run_is_damaged(tmp_path: Path) -> None:
    made = make(tmp_path / "run")
    made.close()
    (made.path / "run.json").unlink()
    why = (
        "missing; name, id and what else it said are taken from what the ranks wrote down; "
        "not known: start, number of nodes"
    )
    assert found(made.path) == [("run.json", why)]


def frame(type_: int, value: Any, seq: int = 7) -> framing.Frame:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return framing.Frame(type_, seq, data)


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (frame(framing.META, {"any": 1}), ""),
        (frame(framing.META, [1]), "frame 7 holds list, expected a JSON object"),
        (frame(framing.LIFE, [1]), "frame 7 holds list, expected a JSON object"),
        (frame(framing.LIFE, {"event": "death", "rank": -4, "time_ns": 1}), "rank"),
        (frame(framing.LIFE, {"event": "of a newer version"}), ""),
        (frame(framing.SAMPLE, {"time_ns": 5}), ""),
        (frame(framing.SAMPLE, {"time_ns": True}), "'time_ns' of a reading is True"),
        (frame(framing.SAMPLE, {}), "'time_ns' of a reading is None"),
        (frame(framing.SAMPLE, {"time_ns": "9" * 90}), "'time_ns' of a reading is '" + "9" * 39),
        (frame(framing.ANOMALY, framing.encode_anomaly(ANOMALY)), ""),
        (frame(framing.ANOMALY, {"detector": 3}), "not an anomaly"),
        (frame(framing.RECORD, b"no JSON"), ""),  # decoding is the check
    ],
)
def test_an_intact_frame_makes_sense_or_it_is_said_why_not(made: framing.Frame, fault: str) -> None:
    said = fault_of_frame(made)
    if fault.startswith(("'time_ns'", "frame 7")) or not fault:
        assert said == fault
    else:
        assert fault in said


def test_a_frame_without_sense_is_damage_at_its_place_in_the_journal_and_in_the_store(
    tmp_path: Path,
) -> None:
    made = make(tmp_path / "run")
    made.tell(framing.SAMPLE, {"time_ns": "x"})
    made.tell(framing.LIFE, {"event": "death", "rank": -4, "time_ns": 1})
    made.close()
    reading, death = found(made.path)
    journal = f"journal/000/{NODE}/daemon"
    assert reading == (
        f"{journal}/00000000.wal",
        "frame 7 makes no sense: 'time_ns' of a reading is 'x'",
    )
    assert death[0] == f"{journal}/00000001.wal"
    assert "makes no sense: " in death[1]
    fold(made)
    shutil.rmtree(made.path / "journal")
    in_store = [(w, why) for w, why in found(made.path) if "node_0000" in w]
    assert all(w == f"run.zarr/attempt_000/{NODE}" for w, _ in in_store)
    assert any(why.startswith("frame ") and " makes no sense: " in why for _, why in in_store)


def test_what_is_gone_from_the_front_of_a_journal_must_be_in_the_group_it_is_folded_into(
    tmp_path: Path,
) -> None:
    made = make(tmp_path / "run", steps=30)
    made.close(cleanly=False)
    rank = sorted(made.run.rank_journal(0, NODE, 0).iterdir())
    daemon = sorted(made.run.daemon_journal(0, NODE).iterdir())
    rank[0].unlink()
    daemon[0].unlink()
    firsts = [framing.decode_frame(p.read_bytes(), 0)[0].seq for p in (daemon[1], rank[1])]
    assert sorted(found(made.path)) == [
        (
            str(path.parent.relative_to(made.path)),
            f"frames 0 to {first - 1} are neither here nor in run.zarr/attempt_000/{group}",
        )
        for path, first, group in zip(
            (daemon[1], rank[1]), firsts, (NODE, "rank_00000"), strict=True
        )
    ]


def test_a_journal_that_is_no_regular_file_is_named(tmp_path: Path) -> None:
    made = make(tmp_path / "run", steps=30)
    made.close()
    second = sorted(made.run.rank_journal(0, NODE, 0).iterdir())[1]
    second.unlink()
    second.mkdir()
    (first, *rest) = [pair for pair in found(made.path) if pair[0].endswith(second.name)]
    assert first[1].startswith("no regular file (")
    assert rest == []


def test_a_place_is_listed_once_and_not_more_than_can_be_read() -> None:
    report = VerifyReport()
    assert report.ok
    for _ in range(2):
        report.add(Lost("a", None, "missing"))
    assert report.damage == [Lost("a", None, "missing")]
    report.add(Lost("a", (0, 3), "missing"))
    assert len(report.damage) == 2
    assert not report.ok
    report.damage = [Lost(str(n), None, "x") for n in range(MOST_DAMAGE - 1)]
    for name in ("last", "too many"):
        report.add(Lost(name, None, "x"))
    assert (len(report.damage), report.damage[-1].where) == (MOST_DAMAGE, "last")


def test_one_frame_that_is_gone_from_the_front_is_missed(tmp_path: Path) -> None:
    made = make(tmp_path / "run", steps=2)
    made.close(cleanly=False)
    (path,) = made.run.rank_journal(0, NODE, 0).iterdir()
    data = path.read_bytes()
    path.write_bytes(data[framing.decode_frame(data, 0)[1] :])
    gone = f"frames 0 to 0 are neither here nor in run.zarr/{GROUP}"
    assert (str(path.parent.relative_to(made.path)), gone) in found(made.path)


def test_captures_are_work_too(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(sealed)
    before = work(run)
    monkeypatch.setattr(module, "captured_events", lambda *_: [None] * 3)
    assert work(run) == before + 3


def test_a_group_whose_metadata_is_damaged_is_told_with_the_reason(sealed: Path) -> None:
    (sealed / "run.zarr" / GROUP / "zarr.json").write_bytes(b"{")
    told = dict(found(sealed))
    for where in (f"run.zarr/{GROUP}", f"run.zarr/{GROUP}/zarr.json"):
        assert "zarr.json" in told[where] or "committed" in told[where], told


def test_a_file_beside_the_groups_of_an_attempt_was_never_committed(sealed: Path) -> None:
    (sealed / "run.zarr" / "attempt_000" / "stray").write_text("x")
    (sealed / "run.zarr" / "elsewhere").mkdir()
    (sealed / "run.zarr" / "elsewhere" / "more").write_text("x")
    report = verify(open_run(sealed))
    assert report.notes == ["run.zarr: 1 files that were never committed"]


def test_behind_a_segment_that_cannot_be_read_the_next_ones_are_looked_at(tmp_path: Path) -> None:
    made = make(tmp_path / "run", steps=30)
    made.close()
    first, second, third, *_ = sorted(made.run.rank_journal(0, NODE, 0).iterdir())
    first.unlink()
    first.mkdir()
    data = bytearray(second.read_bytes())
    data[-1] ^= 1  # of its last frame: how long the segment was is not known
    second.write_bytes(data)
    told = [where for where, _ in found(made.path)]
    assert [told.count(str(p.relative_to(made.path))) for p in (first, second)] == [1, 1]
    # What the third one begins with was due after the second, which nobody can tell.
    assert told.count(str(third.relative_to(made.path))) == 0
