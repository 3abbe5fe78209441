"""Whatever is altered in a store is reported, and never comes back as a different value."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.verify.verify import VerifyReport, verify
from ddpprobe.rundir import framing
from ddpprobe.store.commit import Files, GroupWriter
from ddpprobe.store.manifest import Manifest
from ddpprobe.store.writer import StoreWriter

from ...made_runs import NODE, Made, key, record

STEPS = 20


def fold(made: Made, *, seal: bool = True) -> None:
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    _ = folder.seal() if seal else folder.fold()
    folder.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(tmp_path_factory.mktemp("model") / "run", ranks=1)
    made.write(record(0, step, 3 + (step > 9)) for step in range(STEPS))
    made.tell(framing.LIFE, {"event": "death", "rank": 0, "signal": "SIGKILL", "time_ns": 1})
    made.close()
    fold(made)
    return made.path


@pytest.fixture
def sealed(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "run")
    return tmp_path / "run"


def look(path: Path) -> tuple[VerifyReport, list[bytes], Run]:
    report, run = verify(open_run(path)), open_run(path)
    return report, [key(r) for r in run.records(0)], run


def mutate(rng: random.Random, data: bytes) -> bytes | None:
    """Return the content after one accident; None: the file is gone."""
    match rng.choice(["bit", "bit", "byte", "truncate", "delete", "zeros", "grow"]):
        case "bit":
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case "byte":
            at = rng.randrange(len(data))
            return data[:at] + bytes([(data[at] + rng.randrange(1, 256)) % 256]) + data[at + 1 :]
        case "truncate":
            return data[: rng.randrange(len(data))]
        case "zeros":  # what a file system leaves of a file that was never flushed
            return bytes(len(data))
        case "grow":
            return data + b"\0"
    return None


def test_a_whole_store_is_whole(sealed: Path) -> None:
    report, records, run = look(sealed)
    assert report.ok
    assert report.damage == report.notes == run.lost == []
    assert report.files > 80
    assert records == [key(record(0, s, 3 + (s > 9))) for s in range(STEPS)]


def test_every_mutation_is_reported_and_none_is_taken_for_data(sealed: Path) -> None:
    """Each file meets with one accident; `make test-faults` draws thousands."""
    rng = random.Random(2)
    whole = [key(record(0, s, 3 + (s > 9))) for s in range(STEPS)]
    files = sorted(
        p for d in ("run.zarr", "manifest") for p in (sealed / d).rglob("*") if p.stat().st_size
    )
    files = [p for p in files if p.is_file()]
    losing = 0
    for path in files:
        data = path.read_bytes()
        after = mutate(rng, data)
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
        report, records, run = look(sealed)
        # A byte more at the end of a log is what a killed writer leaves: a note.
        assert report.damage or report.notes, (path, after)
        assert set(records) <= set(whole), (path, after)
        if records != whole:
            losing += 1
            assert run.lost, (path, after)
        path.write_bytes(data)
    assert losing > len(files) / 10
    assert look(sealed)[0].ok


@pytest.mark.parametrize(
    ("accident", "says"),
    [
        (lambda p: (p / "run.zarr/attempt_000/rank_00000/counts/c/0/0/0").unlink(), "missing"),
        (lambda p: shutil.rmtree(p / "run.zarr"), "missing"),
        (lambda p: shutil.rmtree(p / "run.zarr/attempt_000/rank_00000"), "missing"),
        (lambda p: (p / "manifest/attempt_000.rank_00000.log").unlink(), "manifest is missing"),
        (lambda p: shutil.rmtree(p / "manifest"), "manifest is missing"),
    ],
)
def test_what_is_gone_is_named(sealed: Path, accident: Callable[[Path], None], says: str) -> None:
    accident(sealed)
    report = verify(open_run(sealed))
    assert any(says in lost.why for lost in report.damage)


def test_a_lost_zarr_json_is_not_taken_for_a_first_commit_that_was_cut_off(sealed: Path) -> None:
    lost = sorted((sealed / "run.zarr" / "attempt_000").glob("*/zarr.json"))
    assert len(lost) == 2  # rank_00000 and node_0000, each committed once
    for path in lost:
        data = path.read_bytes()
        path.unlink()
        report, _, run = look(sealed)
        run.anomalies()
        assert report.damage, path
        assert run.lost, path
        path.write_bytes(data)


def test_two_chunks_that_changed_places_are_found(sealed: Path) -> None:
    counts = sealed / "run.zarr/attempt_000/rank_00000/counts/c"
    (counts / "0/0/0").rename(counts / "x")
    (counts / "1/0/0").rename(counts / "0/0/0")
    (counts / "x").rename(counts / "1/0/0")
    report, records, run = look(sealed)
    assert {lost.steps for lost in run.lost} == {(0, 7), (8, 15)}
    assert len(records) == STEPS - 16
    assert not report.ok


@pytest.fixture
def journals(tmp_path: Path) -> Made:
    made = Made(tmp_path / "run", ranks=1, segment_frames=8)
    made.write(record(0, step) for step in range(60))
    made.close(cleanly=False)
    return made


def segments(made: Made) -> list[Path]:
    return sorted(made.run.rank_journal(0, NODE, 0).iterdir())


def test_the_torn_end_of_a_killed_writer_is_a_note(journals: Made) -> None:
    newest = segments(journals)[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    report = verify(open_run(journals.path))
    assert report.ok
    assert "not finished" in report.notes[0]


def test_frames_are_counted_and_a_damaged_one_is_told_with_its_place(journals: Made) -> None:
    paths = segments(journals)
    frames = [len(list(framing.iter_frames(path.read_bytes()))) for path in paths]
    assert verify(open_run(journals.path)).frames == sum(frames)
    data = bytearray(paths[2].read_bytes())
    fourth = framing.decode_frame(data, framing.decode_frame(data, 0)[1])[1]
    data[fourth + framing.HEADER.size] ^= 16
    paths[2].write_bytes(data)
    report = verify(open_run(journals.path))
    assert [(lost.where.rpartition("/")[2], lost.why) for lost in report.damage] == [
        (paths[2].name, f"checksum mismatch at byte {fourth}")
    ]
    assert report.frames == sum(frames) - frames[2] + 2
    assert report.notes == []


@pytest.mark.parametrize("at", [9, 40, -400])
def test_a_flipped_bit_in_the_middle_of_a_journal_is_damage(journals: Made, at: int) -> None:
    path = segments(journals)[2]
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)
    run = open_run(journals.path)
    assert not verify(run).ok
    whole = {key(record(0, s)) for s in range(60)}
    left = [key(r) for r in run.records(0)]
    assert set(left) < whole
    assert run.lost


def test_a_longer_length_is_no_torn_end(journals: Made) -> None:
    path = segments(journals)[-1]
    data = bytearray(path.read_bytes())
    data[10] ^= 16  # the length of its first frame: now a megabyte
    path.write_bytes(data)
    assert not verify(open_run(journals.path)).ok


def test_a_journal_segment_that_was_deleted_unfolded_is_damage(journals: Made) -> None:
    segments(journals)[1].unlink()
    (lost,) = verify(open_run(journals.path)).damage
    assert "was due" in lost.why


def test_the_front_of_a_journal_must_be_in_the_store(journals: Made) -> None:
    fold(journals, seal=False)
    assert verify(open_run(journals.path)).ok
    for _ in range(2):
        segments(journals)[0].unlink()
    report = verify(open_run(journals.path))
    assert any("neither here nor in" in lost.why for lost in report.damage)


@pytest.mark.parametrize("replaced", [0, 1, 9, 30])
def test_a_commit_that_was_interrupted_is_no_damage_and_hides_nothing(
    journals: Made, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    fold(journals, seal=False)
    real, left = Files.write, replaced

    def write(files: Files, key_: str, data: bytes) -> None:
        nonlocal left
        if key_ in files.manifest.state.files and files.root.name.startswith("rank"):
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, "as if the writer had been killed here")
        real(files, key_, data)

    monkeypatch.setattr(Files, "write", write)
    with pytest.raises(OSError, match="killed here"):
        fold(journals)
    monkeypatch.undo()
    for state in ("interrupted", "undone", "folded"):
        report, records, run = look(journals.path)
        assert report.damage == run.lost == []
        assert records == [key(record(0, step)) for step in range(60)]
        if state == "interrupted":
            GroupWriter(journals.run, "attempt_000/rank_00000", durable=False)
        else:
            fold(journals)


def test_files_from_before_the_last_commit_are_damage_in_a_settled_store(
    journals: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were committed, and are whole: only their versions tell that others came after.

    The group's own zarr.json stays: it is written last, and by it the commit has happened.
    """
    group = journals.path / "run.zarr/attempt_000/rank_00000"
    before: dict[Path, bytes] = {}
    real = Manifest.append

    def append(manifest: Manifest, *args: object, **options: bool) -> None:
        if "rank" in manifest.path.name:
            before.update({p: p.read_bytes() for p in group.rglob("*") if p.is_file()})
        real(manifest, *args, **options)

    monkeypatch.setattr(Manifest, "append", append)
    fold(journals)
    monkeypatch.undo()
    del before[group / "zarr.json"]
    older = {p: data for p, data in before.items() if p.read_bytes() != data}
    assert {p.name for p in older} > {"zarr.json"}  # chunks too
    assert look(journals.path)[0].ok
    for path, data in older.items():
        path.write_bytes(data)
    report, records, run = look(journals.path)
    assert {str(p.relative_to(journals.path)) for p in older} <= {x.where for x in report.damage}
    assert [lost for lost in run.lost if "it is not what was committed" in lost.why]  # readers, too
    assert {p.name for p in older} > {"zarr.json"}  # chunks too
    assert set(records) <= {key(record(0, step)) for step in range(60)}
    # Nor are they excused where it cannot be told whether the commit has happened.
    (group / "zarr.json").write_bytes(b"{")
    told = {lost.where for lost in look(journals.path)[0].damage}
    assert {str(p.relative_to(journals.path)) for p in (*older, group / "zarr.json")} <= told


def test_a_chunk_that_was_damaged_before_an_append_stays_damage_behind_it(journals: Made) -> None:
    fold(journals, seal=False)
    chunks = journals.path / "run.zarr/attempt_000/rank_00000"
    flipped = [*(chunks / "counts").rglob("c/*/*/*"), *(chunks / "step").rglob("c/*")]
    for path in flipped:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    fold(journals)
    report, records, run = look(journals.path)
    assert run.lost
    assert any("rank_00000" in lost.where for lost in report.damage)
    assert set(records) <= {key(record(0, step)) for step in range(60)}


def test_a_frame_that_was_cut_out_of_the_middle_of_a_journal_is_damage(journals: Made) -> None:
    path = segments(journals)[2]
    data, ends = path.read_bytes(), [0]
    while ends[-1] < len(data):
        ends.append(framing.decode_frame(data, ends[-1])[1])
    cut = framing.decode_frame(data, ends[4])[0]
    path.write_bytes(data[: ends[4]] + data[ends[5] :])
    (lost,) = verify(open_run(journals.path)).damage
    assert lost.where.endswith(path.name)
    assert lost.why == f"frames before {cut.seq + 1} are missing"


def test_the_first_frame_of_a_segment_is_due_and_its_last_one_is_missed_in_the_next(
    journals: Made,
) -> None:
    for end in ("first", "last"):
        path = segments(journals)[2 if end == "first" else 1]
        data, ends = path.read_bytes(), [0]
        while ends[-1] < len(data):
            ends.append(framing.decode_frame(data, ends[-1])[1])
        path.write_bytes(data[ends[1] :] if end == "first" else data[: ends[-2]])
        (lost,) = verify(open_run(journals.path)).damage
        assert (lost.where.endswith("00000002.wal"), "was due" in lost.why) == (True, True)
        path.write_bytes(data)
