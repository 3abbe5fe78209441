"""A run of ten million rows in an object store, as a dataset: what reading it takes of memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from benchmarks import command_line, large_store, tables
from ddpprobe.rundir import paths
from ddpprobe.store.remote.bucket import Bucket
from ddpprobe.store.remote.upload import Upload
from tests.clouds import SECRET, Cloud, serving

FULL, QUICK = (10_000, 1_000), (600, 50)  # sampled steps, sites: a row is a site at a step
URL = "s3://runs/large"
MEMORY_GOAL_MB = 500
# What is asked, in what words, and whether the goal is for it; the first one fetches the run.
QUESTIONS = (
    ("open", "`run = ddpprobe.open(URL)`, nothing fetched before", True),
    ("open", "the same, fetched before", True),
    ("last", "`run.to_xarray(chunks={}).rms.isel(step=-1).compute()`", True),
    ("lazy", '`run.to_xarray(chunks={}).rms.mean("step").compute()`', True),
    ("counts", '`run.to_xarray(chunks={})["counts"].sum("step").compute()`', True),
    ("eager", '`run.to_xarray().rms.mean("step")`: the whole dataset in memory', False),
)


def _upload(path: Path, steps: int, sites: int) -> int:
    """Make the run and bring it to the bucket; return how many objects that were."""
    run = large_store.make(path, steps=steps, sites=sites, ranks=1)
    # As the seal leaves it: an attempt is known by its journals' directories.
    paths.make_dir(run.rank_journal(0, large_store.NODE, 0))
    arrived: list[None] = []
    upload = Upload(run, large_store.NODE, Bucket(URL), lambda: arrived.append(None))
    upload.bring()
    assert not upload.missing, upload.missing
    return len(arrived)


def _settings(cloud: Cloud, scratch: Path) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": cloud.endpoint, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": SECRET, "XDG_CACHE_HOME": str(scratch / "cache"),
    }  # fmt: skip


def _rows() -> list[list[str]]:
    rows, sums = [], {}
    for what, text, has_goal in QUESTIONS:
        command = [sys.executable, "-m", "benchmarks.answer", URL, what]
        found = json.loads(subprocess.check_output(command, text=True))
        goal = [f"<= {MEMORY_GOAL_MB} MB", tables.verdict(found["mb"], MEMORY_GOAL_MB)]
        figures = [f"{found['s']:.1f}", f"{found['mb']:.0f}"]
        rows.append([text, *figures, *(goal if has_goal else ("", ""))])
        sums[what] = found.get("sum")
    assert math.isclose(sums["lazy"], sums["eager"], rel_tol=1e-9), sums
    return rows


def main(argv: Sequence[str] | None = None) -> str:
    """Print and return the section."""
    arguments = command_line.parser("object_store", __doc__).parse_args(argv)
    steps, sites = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(prefix="ddpprobe-object-store-") as folder:
        scratch = Path(folder)
        with serving(scratch) as cloud, mock.patch.dict(os.environ, _settings(cloud, scratch)):
            objects = _upload(scratch / "run", steps, sites)
            rows = _rows()
        cached = sum(p.stat().st_size for p in (scratch / "cache").rglob("*") if p.is_file())
    text = (
        f"A sealed run of {steps:,} sampled steps x {sites:,} sites, {steps * sites:,} rows, of one"
        " rank and of all ranks merged,\n"
        f"as {objects:,} objects in an S3 of moto on this machine. Each question is put by a fresh "
        "process; seconds count from\n`ddpprobe.open` on, the imports of obstore and xarray "
        "included; MB is the process's peak. What was fetched lies on the\n"
        f"disk of the cache ({cached / 1e6:,.0f} MB), and a lazy dataset reads it block by block. "
        "Its mean is that of the dataset in\nmemory."
    )
    header = ("question", "s", "MB", "goal", "holds")
    section = tables.section(
        "A run in an object store", "object_store", text, tables.table(header, rows)
    )
    print(section)
    return section


if __name__ == "__main__":
    main()
