"""What goes on purpose while one reads, by retention or by a fold, is never called lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import pytest

from ddpprobe.cli.main import main
from ddpprobe.errors import TensorError
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing, safe_read, tensor_pack
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import retention, verified_files
from ddpprobe.store.manifest import manifest_path
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.retention import Retention, RetentionLimits
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

from .. import made_packs as made
from ..made_runs import ANOMALY, Made

SITE = "layers.0.mlp.weight:param"
STEPS, BLOCK = 50, 8
ROUNDS = 8  # of the writer beside which others read
HOME = Path(__file__).parents[2]
FOLDED, PACKED = 12, 20  # captured steps: one in the store, one whose packs lie beside it
# A reader is struck before it opens the first file of each of these sorts (of retention, or of a
# fold, the victims), and before so many more opens, evenly spread.
VICTIMS = ("counts/c/0/", "scalars/c/1/", "captures.step_", ".wal", ".pack")
POSITIONS = int(os.environ.get("DDPPROBE_TEST_DRAWS", "0"))

Act = Callable[[RunDir], object]


def fold(run: RunDir) -> None:
    StoreWriter(run, "node_0000", block=BLOCK, durable=False).seal()


def trim(run: RunDir) -> None:
    own = {0: {"rank_00000", "rank_00001", "merged"}}
    Retention(run, Root(run, durable=False), RetentionLimits(max_bytes=1), durable=False).apply(own)


ACTS: dict[str, Act] = {"a fold": fold, "retention": trim}
VERBS = {
    "info": ["info"],
    "anomalies": ["anomalies"],
    "verify": ["verify"],
    "trace": ["trace", "--site", "blocks.0.mlp"],
    "trace of a rank": ["trace", "--site", "blocks.*", "--rank", "1", "--stat", "sum"],
    "compare": ["compare"],
    "baseline": ["baseline"],
    "export": ["export", "--format", "csv", "-o"],
    "report": ["report", "-o"],
}


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> RunDir:
    """A run in the middle: blocks in the store and more in the journals, captures in both."""
    writing = Made(tmp_path_factory.mktemp("half") / "run", segment_frames=8).whole(STEPS)
    writing.tell(framing.ANOMALY, replace(ANOMALY, step=20))
    run = writing.run
    for step in (FOLDED, PACKED):
        whole = made.whole([64, 32], "float32", step)
        made.write(run, [(made.KEY, made.sharded(whole, [2], [0]))], step=step)
        if step == FOLDED:
            StoreWriter(run, "node_0000", block=BLOCK, durable=False).fold()
    for name in ("rank_00000", "rank_00001", "merged"):
        rows = StoredGroup(run, f"attempt_000/{name}").rows
        assert 3 * BLOCK <= rows < STEPS  # blocks that may go, and records that may be folded
    return writing.close()


@pytest.fixture
def run(half: RunDir, tmp_path: Path, monkeypatch) -> RunDir:
    monkeypatch.setattr(retention, "BEFORE", 4)
    monkeypatch.setattr(retention, "AFTER", 2)
    return fresh(half, tmp_path)


def fresh(half: RunDir, where: Path) -> RunDir:
    shutil.rmtree(where / "run", ignore_errors=True)
    shutil.copytree(half.path, where / "run")
    return RunDir(where / "run")


@contextmanager
def striking(act: Callable[[], object], number: int) -> Iterator[list[str]]:
    """Act right before the `number`-th file or directory is opened; yields their names."""
    opened: list[str] = []
    busy = [False]
    descend, open_pack = safe_read._descend, tensor_pack._open

    def strike(name: str) -> None:
        if not busy[0]:
            if len(opened) == number:
                busy[0] = True
                act()
                busy[0] = False
            opened.append(name)

    def descended(root: Path, key: str) -> tuple[str, int]:
        strike(f"{root}/{key}")
        return descend(root, key)

    def opened_pack(path: Path) -> int:
        strike(str(path))
        return open_pack(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safe_read, "_descend", descended)
        patch.setattr(tensor_pack, "_open", opened_pack)
        yield opened


def positions(opened: list[str]) -> list[int]:
    """Return where to strike."""
    firsts = [[i for i, name in enumerate(opened) if victim in name][:1] for victim in VICTIMS]
    spread = np.linspace(0, len(opened) - 1, POSITIONS).astype(int).tolist()
    found = sorted({*chain(*firsts), *spread})
    assert found
    return found


def words(verb: str, run: RunDir, tmp_path: Path) -> list[str]:
    first, *rest = VERBS[verb]
    goods = [str(tmp_path / f"good-{i}") for i in range(2)]
    more = {"compare": [str(run.path)], "baseline": goods, "report": [str(tmp_path / "page.html")],
            "export": [str(tmp_path / "table")]}  # fmt: skip
    return [first, str(run.path), *([*rest, *more.get(verb, [])])]


@pytest.mark.parametrize(
    ("what", "verb"),
    [*(("retention", verb) for verb in VERBS), ("a fold", "verify")],
)
def test_no_verb_calls_lost_what_goes_on_purpose_while_it_reads(
    half, run, tmp_path, what, verb, capsys
):
    command = words(verb, run, tmp_path)
    for good in ("good-0", "good-1"):
        shutil.copytree(half.path, tmp_path / good)
    with striking(lambda: None, -1) as opened:
        usual = main(command)
    assert usual in {0, 1}, capsys.readouterr()
    for number in positions(opened):
        shutil.rmtree(tmp_path / "table", ignore_errors=True)
        run = fresh(half, tmp_path)
        capsys.readouterr()
        with striking(partial(ACTS[what], run), number):
            code = main(command)
        said = capsys.readouterr().err
        assert (code, "run.zarr" in said) == (usual, False), f"before read {number}: {said}"


@pytest.mark.parametrize(("begun", "read"), [(False, "Manifest"), (True, "is_settled")])
def test_a_first_commit_while_a_group_is_opened_is_there(tmp_path, monkeypatch, begun, read):
    """`begun`: the log of the group is there, and nothing is in it yet; `read`: comes before it."""
    run = Made(tmp_path / "run", segment_frames=8).whole(BLOCK).run
    key = "attempt_000/rank_00000"
    if begun:
        manifest_path(run, key).parent.mkdir(exist_ok=True)
        manifest_path(run, key).touch()
    assert not StoredGroup(run, key).exists
    reading = getattr(verified_files, read)

    def read_and_fold(*args: object) -> object:
        found = reading(*args)
        monkeypatch.setattr(verified_files, read, reading)
        fold(run)
        return found

    monkeypatch.setattr(verified_files, read, read_and_fold)
    group = StoredGroup(run, key)
    assert not group.lost
    assert (group.exists, group.rows) == (True, BLOCK)
    assert len([*group.records(0)]) == BLOCK


def numbers(run: RunDir) -> dict[str, object]:
    """Read what no retention takes away, and whatever of the rest is still there."""
    opened = open_run(run.path)
    found = {
        "ranks": opened.ranks(),
        "steps": {n: opened._merged_reader.facts(0, n).steps.tolist() for n in opened.ranks()},
        "told": [a.step for a in opened._merged_reader.daemon_anomalies(0)],
        "events": sorted(str(e.what) for e in opened._merged_reader.events(0)),
    }
    for rank in (None, 1):
        records = [r.step for r in opened.records(rank)]
        assert records == sorted(set(records))
    assert not opened.lost
    return found


@pytest.mark.parametrize("what", ACTS)
def test_nothing_is_missed_that_is_folded_while_one_reads(half, run, tmp_path, what):
    with striking(lambda: None, -1) as opened:
        usual = numbers(run)
    for number in positions(opened):
        run = fresh(half, tmp_path)
        with striking(partial(ACTS[what], run), number):
            found = numbers(run)
        assert found == usual, number


@pytest.mark.parametrize("what", ACTS)
@pytest.mark.parametrize("step", [FOLDED, PACKED])
def test_a_captured_tensor_is_read_whole_or_has_expired(half, run, tmp_path, step, what):
    whole = made.whole([64, 32], "float32", step)

    def read() -> None:
        opened = open_run(run.path)
        try:
            found = opened.tensor(SITE, step)[...]
        except TensorError as error:
            found, why = None, str(error)
        if found is None:
            assert "has expired" in why
        else:
            assert found.tobytes() == whole.tobytes()
        assert [c.step for c in opened.captures() if not c.complete] == []
        assert not opened.lost

    with striking(lambda: None, -1) as opened:
        read()
    for number in positions(opened):
        run = fresh(half, tmp_path)
        with striking(partial(ACTS[what], run), number):
            read()


WRITER = """
import os, sys
from pathlib import Path
from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import DirectoryLock
from ddpprobe.store.retention import RetentionLimits
from ddpprobe.store.writer import StoreWriter
from tests.made_runs import Made, head_merge, record

ROUNDS = int(sys.argv[2])
made = Made(Path(sys.argv[1]), pid=os.getpid(), segment_frames=8)
assert DirectoryLock(made.run.lock).acquire()  # held to the end: the run is under way
limits = RetentionLimits(120_000)
folding = StoreWriter(made.run, "node_0000", block=8, durable=False, limits=limits)
for step in range(8 * ROUNDS):
    parts = [record(rank, step) for rank in range(2)]
    made.write(parts)
    made.tell(framing.RECORD, head_merge(parts))
    if step % 8 == 7:
        folding.fold()
        print(step, flush=True)
for rank in range(2):
    last = {"event": "closed", "status": "ok", "sampled": 8 * ROUNDS}
    made.writer(rank).append_json(framing.LIFE, last)
folding.seal()
"""


def test_readers_beside_a_writer_with_retention_find_nothing_lost(tmp_path, capsys):
    path = tmp_path / "run"
    command = [sys.executable, "-c", WRITER, str(path), str(ROUNDS)]
    rounds = 0
    with subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True) as writing:
        assert writing.stdout
        assert writing.stdout.readline().strip() == "7"
        verbs = cycle(("verify", "trace of a rank", "anomalies", "trace", "info"))
        while writing.poll() is None:
            verb = next(verbs)
            code = main(words(verb, RunDir(path), tmp_path))
            assert code == 0, (verb, rounds, capsys.readouterr().err)
            rounds += 1
    assert writing.returncode == 0
    assert rounds
    opened = open_run(path)
    assert opened.expired()
    assert verify(opened).ok
