"""Models of any width: what a journal held comes back from the store, whatever lies beyond it."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ddpprobe.errors import UnknownSeries
from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.records.step import StepRecord, derive
from ddpprobe.rundir import framing
from ddpprobe.store import regions
from ddpprobe.store.format import SITE_CHUNK_MAX, SITE_PART
from ddpprobe.store.manifest import Manifest, manifest_path, version_of
from ddpprobe.store.writer import StoreWriter

from ..made_runs import NODE, Made, head_merge, key, record

DRAWS = int(os.environ.get("DDPPROBE_TEST_WIDTHS", "4"))  # a longer search by hand
BLOCK = 4
WIDEST = 20_000
NEVER = b"\xff" * 16  # how a Zarr shard's index says that an inner chunk was not written


@dataclass(frozen=True)
class Drawn:
    """A run: of each step its sites, how many ranks, and after which steps it is folded."""

    widths: tuple[int, ...]
    ranks: int = 1
    folds: frozenset[int] = frozenset()


def near(edge: int) -> st.SearchStrategy[int]:
    return st.integers(max(edge - 2, 1), edge + 2)


narrow = st.one_of(
    st.integers(1, 400),
    near(SITE_PART // 2),
    st.integers(1, 5).map(SITE_PART.__mul__).flatmap(near),
)
wide = st.one_of(
    near(SITE_CHUNK_MAX), near(SITE_CHUNK_MAX + SITE_PART), near(2 * SITE_CHUNK_MAX),
    st.integers(700, 5000),
)  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> Drawn:
    # A width holds for some steps; it may also shrink: then some sites have no rows.
    some = draw(st.lists(narrow, min_size=1, max_size=3))
    size = draw(st.integers(0, 59))
    if size < 15:
        some[draw(st.integers(0, len(some) - 1))] = draw(wide)
    elif size == 59:
        some[-1] = draw(st.integers(5000, WIDEST))
    steps = draw(st.integers(1, 11 if max(some) < 700 else 6))
    changes = sorted(draw(st.integers(0, steps - 1)) for _ in some[1:])
    of_step = [some[sum(step >= at for at in changes)] for step in range(steps)]
    ranks = draw(st.integers(1, 3)) if max(some) < 700 else 1
    return Drawn(tuple(of_step), ranks, frozenset(draw(st.sets(st.integers(0, steps - 1)))))


def fold(made: Made, *, last: bool = False) -> None:
    writer = StoreWriter(made.run, NODE, block=BLOCK, durable=False)
    _ = writer.seal() if last else writer.fold()
    writer.close()
    assert writer.damaged == {}


def made_of(path: Path, drawn: Drawn) -> tuple[Made, dict[int | None, list[StepRecord]]]:
    """Write and fold a run; return it with what its journals held, by rank (None: merged)."""
    made = Made(path, ranks=drawn.ranks, segment_frames=3)
    held: dict[int | None, list[StepRecord]] = {}
    for step, width in enumerate(drawn.widths):
        parts = [record(rank, step, width) for rank in range(drawn.ranks)]
        made.write(parts)
        merged = head_merge(parts)
        made.tell(framing.RECORD, merged)
        for rank, one in [(None, merged), *enumerate(parts)]:
            held.setdefault(rank, []).append(one)
        if step in drawn.folds:
            fold(made)
    made.close()
    fold(made, last=True)
    return made, held


@settings(max_examples=DRAWS, deadline=None, suppress_health_check=[*HealthCheck])
@example(Drawn((SITE_CHUNK_MAX + 1,) * 5))
@example(Drawn((186,) * 4 + (306,) * 3, ranks=2))
@given(runs())
def test_every_verb_reads_what_the_journals_held_and_stock_zarr_agrees(drawn: Drawn) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made, held = made_of(Path(directory) / "run", drawn)
        run = open_run(made.path)
        for rank, records in held.items():
            assert [key(r) for r in run.records(rank)] == [key(r) for r in records]
            if rank in (None, 0):
                series_are(run, rank, records)
            stock_zarr_reads(made, rank, records)
        report = verify(run)
        assert [*map(str, [*run.lost, *report.damage])] == []
        assert run.info()["sites"] == len({s.key for r in held[None] for s in r.sites})


def series_are(run: Run, rank: int | None, records: list[StepRecord]) -> None:
    """Ask for sites that lie far apart, and for one that most likely came late."""
    widest = max(len(r.sites) for r in records)
    last = widest - 1
    asked = {f"blocks.{last}.mlp:output": {last}, "blocks.*000.mlp": {*range(1000, widest, 1000)}}
    for (glob, places), stat in zip(asked.items(), ("std", "zero_ratio"), strict=True):
        if not places:
            with pytest.raises(UnknownSeries, match="no site matches"):
                run.series(glob, stat, rank)
            continue
        found = run.series(glob, stat, rank)
        there = [r for r in records if any(p < len(r.sites) for p in places)]
        assert found.steps.tolist() == [r.step for r in there]
        for record_, row in zip(there, found.values, strict=True):
            of_all = derive(stat, record_.counts, record_.values)
            expected = [of_all[p] if p < len(of_all) else np.nan for p in sorted(places)]
            assert np.array_equal(row, np.array(expected), equal_nan=True)


def stock_zarr_reads(made: Made, rank: int | None, records: list[StepRecord]) -> None:
    name = "merged" if rank is None else f"rank_{rank:05d}"
    group = zarr.open_group(made.run.store / "attempt_000" / name, mode="r")
    order, counts, values = (np.asarray(group[k][:]) for k in ("order", "counts", "values"))
    for row, one in enumerate(records):
        place = np.flatnonzero(order[row] >= 0)
        assert np.array_equal(order[row][place], np.arange(len(one.sites)))
        assert np.array_equal(counts[row][place], one.counts)
        assert np.array_equal(values[row][place], one.values)


# ---- what was never written, and what is gone


def without_part(made: Made, key: str, number: int, parts: int) -> None:
    """Take an inner chunk out of a Zarr shard's index, so that every checksum holds."""
    name = "attempt_000/rank_00000"
    path = made.run.store / name / key
    data = path.read_bytes()
    index = bytearray(data[-16 * parts - 4 : -4])
    assert index[16 * number : 16 * number + 16] != NEVER
    index[16 * number : 16 * number + 16] = NEVER
    crc = google_crc32c.value(bytes(index)).to_bytes(4, "little")
    path.write_bytes(data[: -16 * parts - 4] + index + crc)
    log = Manifest(manifest_path(made.run, name))
    log.append(log.state, {key: version_of(path.read_bytes())}, durable=False)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank of 300 sites, then 400, then 600, a block each; in chunks of 384, parts of 128.

    So the second block has no part of the sites 512 and up, in a chunk that it has.
    """
    drawn = Drawn((300,) * 4 + (400,) * 4 + (600,) * 4)
    return made_of(tmp_path_factory.mktemp("grown") / "run", drawn)[0].path


def of(path: Path) -> Made:
    return Made(path, ranks=1)


@pytest.mark.parametrize(
    ("key", "number", "steps"),
    [("values/c/0/0/0", 7, "0 to 3"), ("counts/c/1/1/0", 3, "4 to 7")],
    ids=["of sites that were always there", "of the sites that came"],
)
def test_a_part_that_is_gone_from_where_a_site_had_rows_is_damage(
    grown: Path, tmp_path: Path, key: str, number: int, steps: str
) -> None:
    made = of(shutil.copytree(grown, tmp_path / "run"))
    without_part(made, key, number, parts=12 if key.startswith("values") else 21)
    run = open_run(made.path)
    first, last = map(int, steps.split(" to "))
    left = [r.step for r in run.records(0)]
    assert left == [s for s in range(12) if not first <= s <= last]
    (lost,) = map(str, run.lost)
    name = key.partition("/")[0]
    where = f"run.zarr/attempt_000/rank_00000/{name}, steps {steps}"
    assert lost == f"{where}: {key} cannot be decoded: an inner chunk is missing"
    assert lost in map(str, verify(run).damage)


def test_what_never_had_a_row_is_not_missed_where_its_part_is_not_written(grown: Path) -> None:
    run = open_run(grown)
    assert run.series("blocks.599.mlp", "rms", 0).steps.tolist() == [8, 9, 10, 11]
    assert len(list(run.records(0))) == 12
    assert [*run.lost, *verify(run).damage] == []


def test_nobody_knows_what_was_not_written_where_the_order_of_rows_is_lost(
    grown: Path, tmp_path: Path
) -> None:
    made = of(shutil.copytree(grown, tmp_path / "run"))
    (made.run.store / "attempt_000/rank_00000/order/c/1/1").unlink()
    run = open_run(made.path)
    assert run.series("blocks.599.mlp", "rms", 0).steps.tolist() == [8, 9, 10, 11]
    assert [str(lost) for lost in run.lost] == [
        "run.zarr/attempt_000/rank_00000/counts, steps 4 to 7: order/c/1/1 is missing",
        "run.zarr/attempt_000/rank_00000/values, steps 4 to 7: order/c/1/1 is missing",
    ]


def test_more_than_is_read_at_once_is_read_in_pieces(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [key(r) for r in open_run(grown).records(0)]
    monkeypatch.setattr(regions, "MAX_READ_BYTES", 4 * 384 * 7 * 8)  # a chunk of counts
    run = open_run(grown)
    assert [key(r) for r in run.records(0)] == held
    assert run.series("*", "rms").values.shape == (12, 600)
    assert [*run.lost, *verify(run).damage] == []
