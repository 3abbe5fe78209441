"""The golden store: a small run of every sort of thing, made the same way every time.

`python -m tests.golden_store` writes it anew as tests/golden/store-v<N>/run.tar.xz, N being the
format that the code writes, and beside it values.json: what a reader must find in it.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddpprobe.detectors.suite import DETECTORS
from ddpprobe.reader.run import Run, open_run
from ddpprobe.records.step import STATS, Anomaly
from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import FORMAT_VERSION, RunDir
from ddpprobe.store.retention import Retention, RetentionLimits
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter
from tests import made_packs
from tests.made_runs import ANOMALY, NODE, Made, bad, head_merge, record

HOME = Path(__file__).parent / "golden"
WEIGHT = ("layers.0", "layers.0.weight", "param", "")
SITE = "layers.0.weight:param"
STEPS, BLOCK, SECOND = 24, 8, 10**9
BEGAN = 10**18
EXPIRED, STORED, PACKED = (0, 1), (0, 12), (1, 5)  # attempt and step of a capture


def make(path: Path) -> RunDir:
    """Write the run: two ranks, two starts, the second one cut off.

    The first is sealed, and retention has taken a block of each group and a capture; the second one
    is in the store up to its last segments, with a page, and a capture that is still packs.
    """
    first = _written(Made(path, segment_frames=512), STEPS)
    first.tell(framing.LIFE, {"event": "death", "rank": 1, "signal": "SIGKILL", "time_ns": BEGAN})
    run = first.close()
    _capture(run, *EXPIRED, "capture")
    _capture(run, *STORED, "trigger: asked for")
    writer = StoreWriter(run, NODE, block=BLOCK, durable=False)
    writer.seal()
    writer.close()
    # Of the blocks of 8 steps the first one is older than that, and no page is near.
    limits = RetentionLimits(max_age=STEPS - BLOCK + 0.5)
    own = {0: {"rank_00000", "rank_00001", "merged"}}
    Retention(run, Root(run, durable=False), limits, durable=False).apply(
        own, BEGAN + STEPS * SECOND
    )
    second = _written(Made(path, attempt=1, segment_frames=8), 34)
    second.tell(framing.ANOMALY, replace(ANOMALY, attempt=1))
    second.close(cleanly=False)
    writer = StoreWriter(run, NODE, block=BLOCK, durable=False)
    writer.fold()
    writer.close()
    _capture(run, *PACKED, "nonfinite: 3 NaN")
    return run


def _written(made: Made, steps: int) -> Made:
    """Write steps a second apart, of which the fourth has a bad tensor in the second attempt."""
    for step in range(steps):
        parts = []
        for rank in range(2):
            one = record(rank, step, 2 + (step > 2), made.attempt)
            at = BEGAN + (made.attempt * 100 + step) * SECOND
            scalars = {rank: {**one.scalars[rank], "grad_norm_local": float(rank)}}
            parts.append(replace(one, wall_time_ns=at, scalars=scalars))
        if (made.attempt, step) == (1, 3):
            parts[0] = replace(parts[0], first_bad=bad(0, 3))
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
        if step % 8 == 0:
            ranks = {"0": {"resident_bytes": 1e9, "cpu_seconds": 2.0 * step}}
            host = {"cpu_ratio": 0.5, "memory_available_bytes": 2.0**34}
            made.tell(framing.SAMPLE, {"time_ns": BEGAN + step, "host": host, "ranks": ranks})
    return made


def _capture(run: RunDir, attempt: int, step: int, reason: str) -> None:
    bits = made_packs.whole([6, 5], "bfloat16", step)
    parts = made_packs.sharded(bits, [2], [0])
    made_packs.write(run, [(WEIGHT, parts)], step=step, attempt=attempt, reason=reason)


def values(run: Run) -> dict[str, Any]:
    """Return what a reader finds, as JSON holds it exactly; NaN, which JSON has not, as None."""
    series = {
        f"{attempt} {rank} {stat}": {
            "steps": found.steps.tolist(),
            "sites": [str(site) for site in found.sites],
            "values": _plain(found.values.tolist()),
        }
        for attempt in run.attempts()
        for rank in (None, 1)
        for stat in ("numel", "min")
        for found in (run.series("*", stat, rank, attempt=attempt),)
    }
    scalars = run.scalars("loss", attempt=1)
    info = run.info()
    tensors = {
        f"{attempt} {step}": np.asarray(run.tensor(SITE, step, attempt)[...])
        .view(np.uint16).ravel().tolist()
        for attempt, step in (STORED, PACKED)
    }  # fmt: skip
    found = {
        "stats": list(STATS),
        "identity": {k: info[k] for k in ("name", "run_id", "world_size", "format_version")},
        "steps": [[a["attempt"], a["steps"], a["sealed"]] for a in info["attempts"]],
        "ranks": [[r["rank"], r["status"], r["sampled"]] for r in info["attempts"][0]["ranks"]],
        "first_death": info["first_death"],
        "series": series,
        "loss": [scalars.steps.tolist(), scalars.ranks, _plain(scalars.values.tolist())],
        "anomalies": [json.loads(framing.encode_anomaly(a)) for a in _recorded(run)],
        "readings": [
            [r.attempt, r.node, r.time_ns, r.host, {str(k): v for k, v in r.ranks.items()}]
            for r in run.readings()
        ],
        "captures": [[c.attempt, c.step, c.reason, c.complete] for c in run.captures()],
        "tensors": tensors,
        "expired": [str(gone) for gone in run.expired()],
        "lost": [str(lost) for lost in run.lost],
    }
    told: dict[str, Any] = json.loads(json.dumps(_plain(found)))
    return told


def _recorded(run: Run) -> list[Anomaly]:
    """Return what the store says went wrong: what detectors make of it changes with them."""
    known = {d.name for d in DETECTORS} - {ANOMALY.detector}
    return [a for a in run.anomalies() if a.detector not in known]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def archive(run: Path) -> bytes:
    """Return the files of a run as a tar archive that is the same every time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=9) as tar:
        for path in sorted(p for p in run.rglob("*") if p.is_file()):
            entry = tarfile.TarInfo(path.relative_to(run).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o600
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return out.getvalue()


def unpack(version: int, into: Path) -> Path:
    """Unpack the golden store of a format version into a directory; return the run's."""
    run = into / f"store-v{version}"
    run.mkdir()
    with tarfile.open(HOME / run.name / "run.tar.xz") as tar:
        tar.extractall(run, filter="data")
    return run


def main() -> int:
    """Write the golden store of the current format."""
    home = HOME / f"store-v{FORMAT_VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = make(Path(folder) / "run")
        data = archive(run.path)
        found = values(open_run(run.path))
    (home / "run.tar.xz").write_bytes(data)
    text = json.dumps(found, indent=1, sort_keys=True)
    (home / "values.json").write_text(text + "\n")
    print(f"{home}: {len(data)} bytes, values {len(text)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
