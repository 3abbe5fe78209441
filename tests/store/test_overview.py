"""The overview: a small Parquet file a run, of the same numbers as the run; and SQL over many."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ddpprobe.cli import main as cli
from ddpprobe.daemon import overview_job
from ddpprobe.daemon.overview_job import OverviewJob
from ddpprobe.reader.run import open_run
from ddpprobe.rundir import framing
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import overview_file
from ddpprobe.store.overview import TYPES
from ddpprobe.store.overview_file import NAME
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, NODE, Made, head_merge, record

STEPS = 30
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "many-runs.md"
SQL = re.compile(r"^```sql\n(.*?)^```", re.MULTILINE | re.DOTALL)


def sealed(path: Path, steps: int = STEPS, lr: str = "0.1") -> RunDir:
    """Write a run with a page, a loss that is NaN once, a site that comes late, a note; seal it."""
    made = Made(path)
    made.write(record(r, 0) for r in range(2))
    config = {"event": "note", "step": 0, "what": "", "config": {"lr": lr}}
    made.writer(0).append_json(framing.LIFE, config)
    made.tell(framing.RECORD, head_merge([record(r, 0) for r in range(2)]))
    for step in range(1, steps):
        parts = [record(r, step, 3 + (step >= 20)) for r in range(2)]
        if step == 5:
            bad = {"loss": float("nan"), "loss@-1": 1.0, "grad_norm_local": 1.0}
            parts[1] = replace(parts[1], scalars={1: bad})
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
    made.tell(framing.ANOMALY, ANOMALY)
    run = made.close()
    folder = StoreWriter(run, NODE, block=8, durable=False)
    folder.fold()
    folder.seal()
    folder.close()
    return run


def steps_of(run: RunDir) -> int:
    return len(open_run(run.path).to_xarray().step)


def written(run: RunDir, state: str = "ended") -> list[dict[str, object]]:
    """Let the daemon's job write the overview; return its rows."""
    job = OverviewJob(run, 0, lambda: state, Fuse("store"))
    looks = 0
    while not job.done:
        job.advance()
        looks += 1
    assert looks > steps_of(run) // 8  # never more than one block at one go
    return pq.read_table(run.path / NAME).to_pylist()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return sealed(tmp_path_factory.mktemp("made") / "run")


def test_the_numbers_of_a_row_are_those_of_the_run(run: RunDir) -> None:
    rows = {(row["fqn"], row["kind"]): row for row in written(run)}
    opened = open_run(run.path)
    series = {stat: opened.series("*", stat) for stat in ("rms", "abs_max", "zero_ratio")}
    assert len(rows) == 4 + 2
    for column, site in enumerate(series["rms"].sites):
        row, rms = rows[site.fqn, site.kind], series["rms"].values[:, column]
        rms = rms[~np.isnan(rms)]
        assert row["steps"] == len(rms) == (STEPS - 20 if site.fqn == "blocks.3.mlp" else STEPS)
        assert (row["first"], row["last"]) == (rms[0], rms[-1])
        assert (row["min"], row["max"]) == (rms.min(), rms.max())
        assert row["mean"] == pytest.approx(rms.mean())
        assert row["abs_max"] == np.nanmax(series["abs_max"].values[:, column])
        assert row["zero_ratio"] == pytest.approx(
            np.nanmean(series["zero_ratio"].values[:, column])
        )
        assert row["nonfinite"] == 0
    loss = opened.scalars("loss").values
    row = rows["loss", "scalar"]
    assert (row["nonfinite"], row["steps"]) == (1, STEPS)
    assert row["mean"] == pytest.approx(np.nanmean(loss, axis=1).mean())
    assert row["last"] == pytest.approx(1 / STEPS)
    first = {name: row[name] for name in ("state", "pages", "cause_module", "cause_step")}
    assert first == {
        "state": "ended", "pages": 1, "cause_module": "blocks.1.mlp", "cause_step": 3,
    }  # fmt: skip
    assert row["config"] == '{"lr": "0.1"}'
    assert (row["first_step"], row["last_step"], row["sampled_steps"]) == (0, STEPS - 1, STEPS)


def diverged(path: Path, ends: float, ranks: tuple[int, ...] = (0, 1), lr: str = "9.9") -> RunDir:
    """Write and seal a run whose loss falls, and is `ends` on some ranks at the last step."""
    made = Made(path)
    config = {"event": "note", "step": 0, "what": "", "config": {"lr": lr}}
    made.writer(0).append_json(framing.LIFE, config)
    for step in range(12):
        parts = [record(r, step) for r in range(2)]
        if step == 11:
            for r in ranks:
                parts[r] = replace(parts[r], scalars={r: {"loss": ends}})
            for part in parts:
                part.counts[0, 1] = part.counts[0, 0]  # of the first site all are NaN
                part.counts[1, 1] = 3  # of the second some
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
    run = made.close()
    folder = StoreWriter(run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    return run


@pytest.mark.parametrize(
    ("ends", "ranks", "last"),
    [
        (math.nan, (0, 1), math.nan),
        (math.nan, (1,), math.nan),  # the mean over all ranks
        (math.inf, (0,), math.inf),
        (-math.inf, (0, 1), -math.inf),
    ],
)
def test_a_run_that_ended_in_nan_does_not_look_like_its_last_good_step(
    tmp_path: Path, ends: float, ranks: tuple[int, ...], last: float
) -> None:
    run = diverged(tmp_path / "run", ends, ranks)
    rows = {row["fqn"]: row for row in written(run)}
    loss = rows["loss"]
    assert loss["last"] == pytest.approx(last, nan_ok=True)
    assert (loss["first"], loss["nonfinite"]) == (1.0, len(ranks))
    finite = 12 if len(ranks) == 1 else 11
    assert (loss["steps"], loss["min"]) == (finite, pytest.approx(1 / finite))
    assert (loss["max"], np.isfinite(loss["mean"])) == (1.0, True)
    rms = open_run(run.path).series("*", "rms").values
    site = rows["blocks.0.mlp"]
    assert (math.isnan(site["last"]), site["steps"]) == (True, 11)
    assert (site["max"], site["first"]) == (np.nanmax(rms[:, 0]), rms[0, 0])
    some = rows["blocks.1.mlp"]
    assert (some["last"], some["nonfinite"], some["steps"]) == (rms[-1, 1], 6, 12)


def test_a_first_step_that_is_not_finite_is_the_first(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step in range(3):
        loss = math.nan if step == 0 else 2.0
        parts = [replace(record(r, step), scalars={r: {"loss": loss}}) for r in range(2)]
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
    run = made.close()
    folder = StoreWriter(run, NODE, durable=False)
    folder.seal()
    folder.close()
    (row,) = (row for row in written(run) if row["fqn"] == "loss")
    assert (math.isnan(row["first"]), row["last"], row["steps"], row["mean"]) == (True, 2.0, 2, 2.0)


def test_export_writes_what_the_daemon_writes(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "exported.parquet"
    assert cli.main(["export", str(run.path), "--format", "overview", "-o", str(out)]) in (0, 4)
    ours = pq.read_table(out).to_pylist()
    state = open_run(run.path).endings()[0].end.state
    for mine, theirs in zip(ours, written(run, state), strict=True):
        assert list(mine) == list(TYPES)
        means = [(row.pop("mean"), row.pop("zero_ratio")) for row in (mine, theirs)]
        assert means[0] == pytest.approx(means[1])
        assert mine == theirs


def test_what_ran_is_that_of_the_newest_attempt_as_info_has_it(tmp_path: Path) -> None:
    sealed(tmp_path / "run", 4)
    made = Made(tmp_path / "run", ranks=1, attempt=1)
    made.write(record(0, step, attempt=1) for step in range(4))
    made.tell(framing.RECORD, record(0, 0, attempt=1))
    told = {"event": "topology", "wrapper": "fsdp", "device": "cpu"}
    made.writer(0).append_json(framing.LIFE, told)
    run = made.close()
    folder = StoreWriter(run, NODE, block=8, durable=False)
    folder.fold()
    folder.seal()
    folder.close()
    job = OverviewJob(run, 1, lambda: "ended", Fuse("store"))
    while not job.done:
        job.advance()
    daemons = pq.read_table(run.path / NAME).to_pylist()[0]
    out, info = tmp_path / "exported.parquet", open_run(run.path).info()
    cli.main(["export", str(run.path), "--format", "overview", "-o", str(out)])
    for row in (daemons, pq.read_table(out).to_pylist()[0]):
        assert (row["attempt"], row["ranks"], row["wrapper"]) == (1, 1, "fsdp")
        assert (info["world_size"], info["wrapper"]) == (1, "fsdp")


def test_of_the_ranks_one_is_read_at_one_go(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Spy(StoredGroup):
        def __init__(self, of: RunDir, key: str) -> None:
            read.append(key)
            super().__init__(of, key)

    monkeypatch.setattr(overview_file, "StoredGroup", Spy)
    job, at_once = OverviewJob(run, 0, lambda: "ended", Fuse("store")), []
    while not job.done:
        before = len(read)
        job.advance()
        at_once.append([key for key in read[before:] if "/rank_" in key])
    assert [keys for keys in at_once if keys] == [
        [f"attempt_000/rank_{rank:05d}"] for rank in range(2)
    ]


def test_the_daemon_s_writer_imports_neither_pandas_nor_zarr(tmp_path: Path) -> None:
    rows = {name: ["a" if kind == "text" else 1] for name, kind in TYPES.items()}
    command = [sys.executable, "-X", "importtime", "-m", overview_job.WRITER, tmp_path / NAME]
    done = subprocess.run(
        command, input=json.dumps(rows), capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pyarrow.parquet" in loaded
    assert not {"pandas._libs", "zarr", "numcodecs"} & loaded
    assert pq.read_table(tmp_path / NAME).num_rows == 1


def test_a_part_of_a_run_has_no_overview(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["export", str(run.path), "--format", "overview", "--steps", "3:"]
    assert cli.main(asked) == 2
    assert "an overview is of the whole run: leave --rank" in capsys.readouterr().err


def test_a_damaged_block_is_left_out(tmp_path: Path) -> None:
    run = sealed(tmp_path / "run")
    (run.store / "attempt_000/merged/values/c/1/0/0").write_bytes(b"no shard")
    rows = {row["fqn"]: row for row in written(run)}
    assert rows["blocks.0.mlp"]["steps"] == STEPS - 8


def test_without_pyarrow_a_run_ends_as_ever_and_export_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sealed(tmp_path / "run", steps=4)
    monkeypatch.setattr(overview_job, "find_spec", lambda _: None)
    job = OverviewJob(run, 0, lambda: "ended", Fuse("store"))
    job.advance()
    assert job.done
    assert not (run.path / NAME).exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main(["export", str(run.path), "--format", "overview", "-o", "x.parquet"]) == 2
    assert "pip install 'ddpprobe[parquet]'" in capsys.readouterr().err


def test_the_how_to_over_many_runs_can_be_typed_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, steps, lr in (("a", 30, "0.1"), ("b", 10, "0.2")):
        run = sealed(tmp_path / "ddpprobe-runs" / name, steps, lr)
        written(run, "ended" if name == "a" else "crashed")
    # Its last good step is better than all of "b"; it is no good run for that.
    written(diverged(tmp_path / "ddpprobe-runs" / "c", math.nan))
    asked = SQL.findall(HOW_TO.read_text())
    assert len(asked) == 3
    # In a process of its own: duckdb complains of its own references when one ends.
    script = (
        "import duckdb, json, sys\n"
        "print(json.dumps([duckdb.sql(text).fetchall() for text in sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *asked], check=True, capture_output=True)
    best, growing, causes = json.loads(done.stdout)
    assert [(row[1], row[2]) for row in best[:2]] == [("0.1", 1 / 30), ("0.2", 1 / 10)]
    assert (best[2][1], math.isnan(best[2][2])) == ("9.9", True)
    assert all(math.isfinite(row[2]) for row in growing)
    assert {row[1] for row in growing} == {f"blocks.{n}.mlp" for n in range(4)}
    assert causes == [["nonfinite", "blocks.1.mlp", 2]]
