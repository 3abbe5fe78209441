"""Whatever is left of a run, every verb is right or says what is not known: no false all-clear.

One fault, a NaN on rank 1 at step 14 of 20, and everything that may become of its records.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddpprobe.cli.main import main
from ddpprobe.reader.collect.job import collect
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing, heartbeat
from ddpprobe.rundir.paths import DirectoryLock
from ddpprobe.store.retention import Retention, RetentionLimits
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, NODE, Made, bad, head_merge, record

STEPS, FAULT, BLOCK = 20, 14, 4  # five blocks of the store, the fault amid the fourth
PAGE = replace(ANOMALY, step=FAULT, rank=1, values={"nan": 3.0}, message="3 NaN of 8 elements")
CLEAR = ("no anomalies", "No anomalies", "No page", "no page")
VERBS = (
    "anomalies", "info", "trace", "replay", "report", "compare", "baseline", "export", "verify",
    "top",
)  # fmt: skip
OK, PAGED, DAMAGED, INCOMPLETE = 0, 1, 3, 4
State = Callable[[Path], Path]


def parts_of(step: int, ranks: int) -> list[StepRecord]:
    parts = [record(r, step) for r in range(ranks)]
    if step >= FAULT:
        parts[1] = replace(parts[1], first_bad=bad(1, step))
    return parts


def write(
    path: Path, *, ranks: int = 2, told: int = STEPS, held: int = STEPS, closed: bool = True,
    beats: bool = True, head: bool = True, of: tuple[int, ...] | None = None, node: str = NODE,
) -> Made:  # fmt: skip
    """Write a run of ranks `of`: `told` steps are merged, the journal of rank 1 takes `held`."""
    made = Made(path, ranks=ranks, node=node)
    mine = range(ranks) if of is None else of
    for step in range(STEPS):
        parts = parts_of(step, ranks)
        made.write(p for p in parts if p.ranks[0] in mine and (step < held or p.ranks[0] != 1))
        if head and step < told:
            merged = [p for p in parts if step < held or p.ranks[0] != 1]
            missing = () if step < held else (1,)
            made.tell(framing.RECORD, replace(head_merge(merged), missing=missing))
            if step == FAULT and held > FAULT:
                made.tell(framing.ANOMALY, PAGE)
    for rank in mine:
        whole = rank != 1 or held == STEPS
        if closed and whole:
            last = {"event": "closed", "status": "ok", "sampled": STEPS}
            made.writer(rank).append_json(framing.LIFE, last)
        if beats:
            beat(made, rank, closed=closed and whole)
    if head and told == STEPS and closed:
        made.tell(framing.LIFE, {"event": "finished"})
    made.close(cleanly=False)
    return made


def beat(made: Made, rank: int, *, closed: bool) -> None:
    writer = heartbeat.HeartbeatWriter(made.run.heartbeat(0, made.node, rank))
    writer.beat(
        step=STEPS - 1, micro=0, state=heartbeat.STATES.index("closed" if closed else "forward"),
        steps=STEPS, skipped=0, sampled=STEPS, phase_seconds=(0, 0, 0, 0), probe_seconds=0,
    )  # fmt: skip
    writer.close()


def sealed(made: Made) -> Path:
    writer = StoreWriter(made.run, made.node, block=BLOCK, durable=False)
    writer.seal()
    writer.close()
    return made.path


def trimmed(made: Made) -> Path:
    """Let retention take what it may of a sealed run."""
    sealed(made)
    own = {0: {"rank_00000", "rank_00001", "merged"}}
    limits = RetentionLimits(max_bytes=1)
    Retention(made.run, Root(made.run, durable=False), limits, durable=False).apply(own)
    return made.path


def collected(path: Path, *, both: bool) -> Path:
    """Put the directories of two nodes together, or take only the second one's."""
    parts = [write(path / "0", ranks=4, of=(0, 1)), write(
        path / "1", ranks=4, of=(2, 3), head=False, node="node_0001"
    )]  # fmt: skip
    sources = [sealed(made) for made in parts]
    collect(path / "all", sources if both else sources[1:])
    return path / "all"


def folded(made: Made) -> Path:
    writer = StoreWriter(made.run, NODE, block=BLOCK, durable=False)
    writer.fold()
    writer.close()
    return made.path


def elsewhere(path: Path, *groups: str) -> Path:
    """Leave of a run what an object store has of it: no journals, no heartbeats, these groups."""
    for name in ("journal", "heartbeat", "run.lock"):
        gone = path / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
    for manifest in sorted((path / "manifest").glob("attempt_000.*.log")):
        name = manifest.name.split(".")[1]
        if groups and name not in groups:
            manifest.unlink()
            shutil.rmtree(path / "run.zarr" / "attempt_000" / name, ignore_errors=True)
    return path


STATES: dict[str, State] = {
    "sealed": lambda path: sealed(write(path)),
    "journals only": lambda path: write(path).path,
    "without a daemon": lambda path: write(path, head=False).path,
    "half folded": lambda path: folded(write(path)),
    "crashed": lambda path: write(path, closed=False).path,
    "the daemon died before the fault": lambda path: write(path, told=FAULT - 1).path,
    "all killed": lambda path: folded(write(path, told=FAULT - 1, closed=False)),
    "uploaded and sealed": lambda path: elsewhere(sealed(write(path))),
    "uploaded, not sealed": lambda path: elsewhere(folded(write(path, closed=False))),
    "uploaded: the verdict only": lambda path: elsewhere(sealed(write(path)), "anomalies"),
    "uploaded: one rank only": lambda path: elsewhere(sealed(write(path)), "rank_00000"),
    "uploaded: what was merged only": lambda path: elsewhere(sealed(write(path)), "merged"),
    "retention took what it may": lambda path: trimmed(write(path)),
    "nodes collected": lambda path: collected(path, both=True),
    "one node collected": lambda path: collected(path, both=False),
    "the head's node only": lambda path: write(path, ranks=4, of=(0, 1)).path,
    "another node only": lambda path: write(path, ranks=4, of=(2, 3), head=False).path,
    **{
        f"the disk took {held} steps of rank 1": (
            lambda path, held=held, beats=beats: write(path, held=held, beats=beats).path
        )
        for held, beats in zip((0, 1, 3, 4, 8, 12, 13, 14, 15, 19), [True, False] * 5, strict=True)
    },
    "that, and sealed": lambda path: sealed(write(path, held=8)),
    "that, uploaded": lambda path: elsewhere(sealed(write(path, held=8))),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_every_verb_is_right_or_says_what_is_not_known(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = STATES[state](tmp_path / "run")
    page = tmp_path / "page.html"
    goods = [str(shutil.copytree(path, tmp_path / f"good-{i}")) for i in range(2)]
    more = {"trace": ["--site", "*"], "report": ["-o", str(page)], "compare": [str(path)],
            "baseline": goods,
            "export": ["--format", "csv"], "top": ["--once"]}  # fmt: skip
    said = {}
    for verb in VERBS:
        code = main([verb, str(path), *more.get(verb, [])])
        out, err = capsys.readouterr()
        said[verb] = code, out, err
    columns = " ".join(said["anomalies"][1].split())  # how wide they are depends on the other rows
    known = f"PAGE step {FAULT} micro 1 rank 1" in columns
    assert known or said["anomalies"][0] in (DAMAGED, INCOMPLETE), said["anomalies"]
    assert not known or said["anomalies"][0] in (PAGED, DAMAGED)
    assert known or not any(text in said["anomalies"][1] for text in CLEAR)
    found = json.loads(_json(path, "info", capsys))
    assert found["complete"] == (not said["info"][2])
    text = page.read_text() if page.exists() else ""
    assert known or not any(f">{clear}" in text for clear in CLEAR), state
    whole = found["complete"] and not found["lost"]
    for verb in VERBS[1:]:
        code, _, err = said[verb]
        assert (code == OK) == whole or code == 2, (verb, code, err)
        assert (not err) == whole or code == 2, (verb, err)


def test_a_live_run_is_judged_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path)
    for step in range(FAULT):
        made.write(parts_of(step, 2))
    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()
    assert main(["anomalies", str(tmp_path)]) == OK
    assert capsys.readouterr().out == f"no anomalies so far in {FAULT} sampled steps\n"
    lock.release()
    made.close(cleanly=False)


def _json(path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    main([verb, str(path), "--json"])
    return capsys.readouterr().out
