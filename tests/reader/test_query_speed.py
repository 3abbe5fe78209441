"""What an answer reads and imports; how long it takes is for `benchmarks/queries.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import large_store
from ddpprobe.reader.run import Run, open_run
from ddpprobe.records.step import derive
from ddpprobe.store import format as fmt
from ddpprobe.store import verified_files
from ddpprobe.store.committed_files import CommittedFiles

STEPS, SITES = 600, 300  # three blocks of steps, three parts of sites
SITE = "blocks.3.mlp:output"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("large") / "run"
    return large_store.make(made, steps=STEPS, sites=SITES, ranks=2).path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that are read of the chunks, by array."""
    found = Counter[str]()
    shard, load = verified_files.Shard, CommittedFiles.load

    def part(self: object, number: int, real: object = shard.part) -> bytes:
        data = real(self, number)  # type: ignore[operator]
        found["parts"] += 1
        found["bytes of parts"] += len(data)
        return data

    def whole(self: CommittedFiles, key: str) -> bytes | None:
        data = load(self, key)
        found[key.partition("/")[0]] += len(data or b"") if "/c/" in key else 0
        return data

    monkeypatch.setattr(shard, "part", part)
    monkeypatch.setattr(CommittedFiles, "load", whole)
    return found


def test_the_first_cause_is_found_without_any_statistic(path: Path, read: Counter[str]) -> None:
    (cause,) = open_run(path).anomalies()
    assert cause.first_cause
    assert cause.module == "blocks.3.mlp"
    assert read["parts"] == read["counts"] == read["values"] == read["order"] == 0


def test_a_series_reads_the_columns_it_is_made_of_and_the_sites_beside_it(
    path: Path, read: Counter[str]
) -> None:
    blocks = -(-STEPS // fmt.BLOCK)
    series = open_run(path).series(SITE, "rms")
    assert series.values.shape == (STEPS, 1)
    # sum_sq; numel, three sorts of non-finite elements, observed: of one part of the sites each.
    assert read["parts"] == 6 * blocks
    assert read["counts"] == read["values"] == read["order"] == 0


def test_of_sites_far_apart_nothing_between_them_is_read(path: Path, read: Counter[str]) -> None:
    run = open_run(path)
    # blocks 13 to 19 and 53 to 59: the first and the third part of the sites.
    series = run.series("blocks.[15][3-9].mlp:output", "zeros")
    assert read["parts"] == 2 * 6 * -(-STEPS // fmt.BLOCK)
    assert read["counts"] == read["values"] == read["order"] == 0
    record = next(run.records())
    wanted = [i for i, site in enumerate(record.sites) if site in series.sites]
    assert len(wanted) == 14
    expected = derive("zeros", record.counts[wanted], record.values[wanted])
    assert np.array_equal(series.values[0], expected)


def test_steps_that_are_not_asked_for_are_not_read(path: Path, read: Counter[str]) -> None:
    late = slice(large_store.EVERY * (STEPS - 5), None)
    assert open_run(path).series(SITE, "rms", steps=late).values.shape == (5, 1)
    assert read["parts"] == 6


def test_what_is_read_in_parts_equals_what_is_read_whole(path: Path) -> None:
    run = open_run(path)
    for stat in ("rms", "std", "zero_ratio", "nan", "abs_max"):
        series = run.series("blocks.*.mlp:grad_output", stat, rank=1)
        for record in run.records(1):
            if record.step % 1700:
                continue
            at = [i for i, site in enumerate(record.sites) if site.kind == "grad_output"]
            expected = derive(stat, record.counts[at], record.values[at])
            (row,) = np.flatnonzero(series.steps == record.step)
            assert np.array_equal(series.values[row], expected, equal_nan=True)


def test_a_part_that_was_altered_is_lost_and_no_value(path: Path, tmp_path: Path) -> None:
    chunk = path / "run.zarr/attempt_000/merged/values/c/1/0/0"
    data = chunk.read_bytes()
    where = _second_index_entry(data)
    try:
        chunk.unlink()  # a hard link to others
        chunk.write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
        run: Run = open_run(path)
        found = run.series(SITE, "rms")
    finally:
        chunk.write_bytes(data)
    assert len(found.steps) == STEPS - fmt.BLOCK
    assert [lost.where for lost in run.lost] == ["run.zarr/attempt_000/merged/values"]


def _second_index_entry(data: bytes) -> int:
    """Return a place inside the part of `sum_sq` of the first sites."""
    parts = 4 * 3
    table = np.frombuffer(data[-16 * parts - 4 : -4], "<u8").reshape(parts, 2)
    return int(table[3, 0]) + 40


def test_reading_imports_neither_torch_nor_zarr(path: Path) -> None:
    code = (
        "import json, sys; from ddpprobe.cli.main import main\n"
        "for verb in (['anomalies'], ['info'], ['trace', '--site', sys.argv[2]], ['verify']):\n"
        "    main([verb[0], sys.argv[1], *verb[1:]])\n"
        "print(json.dumps(sorted({'torch', 'zarr', 'xarray', 'pandas'} & {*sys.modules})))"
    )
    command = [sys.executable, "-c", code, str(path), SITE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(said.splitlines()[-1]) == []
