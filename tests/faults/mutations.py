"""Accidents to the files of a store with captures: none may come back as another value."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ddpprobe.errors import StoreDamaged, TensorError
from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing
from ddpprobe.store.writer import StoreWriter
from tests import made_packs
from tests.made_runs import NODE, Made, key

STEPS, CAPTURED = 12, 7
SITE = "layers.0.mlp.weight:param"
HOW = ("bit", "bit", "bit", "byte", "truncate", "zeros", "grow", "delete", "swap")


def make(path: Path) -> None:
    """Write a sealed run of one rank, with a verdict and a captured tensor of two ranks."""
    made = Made(path, ranks=1).whole(STEPS)
    whole = made_packs.whole([5, 7], "float32")
    made_packs.write(made.run, [(made_packs.KEY, made_packs.sharded(whole, [2], [0]))])
    made.close()
    folder = StoreWriter(made.run, NODE, block=6, durable=False)
    folder.seal()
    folder.close()


def change(rng: random.Random, how: str, path: Path, other: Path) -> None:
    """Let one accident happen to a file."""
    data = path.read_bytes()
    at = rng.randrange(len(data))
    match how:
        case "bit":
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        case "byte":
            new = (data[at] + rng.randrange(1, 256)) % 256
            path.write_bytes(data[:at] + bytes([new]) + data[at + 1 :])
        case "truncate":
            path.write_bytes(data[:at])
        case "zeros":  # what a file system leaves of a file that was never flushed
            path.write_bytes(bytes(len(data)))
        case "grow":
            path.write_bytes(data + b"\0")
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes(other.read_bytes())


def values(run: Run) -> Iterator[tuple[str, bytes]]:
    """Yield everything that a reader hands out, by what it is."""
    for made in run.records(0):
        yield f"record {made.step}", key(made)
    for anomaly in run.anomalies():
        yield f"anomaly {anomaly.detector} {anomaly.step}", framing.encode_anomaly(anomaly)
    series = run.series("*", "rms", rank=0)
    for column, site in enumerate(series.sites):
        for step, value in zip(series.steps, series.values[:, column], strict=True):
            if not np.isnan(value):
                yield f"rms of {site} at {step}", np.float64(value).tobytes()
    for captured in run.captures():
        try:
            yield f"tensor {captured.step}", run.tensor(SITE, captured.step)[...].tobytes()
        except (TensorError, StoreDamaged) as error:
            yield "tensor", type(error).__name__.encode()  # refused, and so not silent


def problem(path: Path, whole: dict[str, bytes]) -> str:
    """Read everything; return what is wrong without a word about it, "" if nothing is."""
    report = verify(open_run(path))
    run = open_run(path)
    found = dict(values(run))
    refused = found.pop("tensor", None)
    wrong = [name for name, value in found.items() if whole.get(name) != value]
    if wrong:
        return f"wrong value: {wrong[:3]}"
    if whole.keys() - found.keys() and not (run.lost or refused):
        return f"lost without a word: {sorted(whole.keys() - found.keys())[:3]}"
    return "" if report.damage or report.notes else "verify says nothing"


def mutate(scratch: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Let `count` accidents happen, one after the other; return how many of each, and problems."""
    path = scratch / "run"
    make(path)
    files = sorted(p for d in ("run.zarr", "manifest") for p in (path / d).rglob("*"))
    files = [p for p in files if p.is_file() and p.stat().st_size]
    whole, rng = dict(values(open_run(path))), random.Random(seed)
    assert len(whole) > STEPS, whole.keys()
    assert verify(open_run(path)).ok
    done, found = Counter[str](), []
    for number in range(count):
        one, other, how = rng.choice(files), rng.choice(files), rng.choice(HOW)
        data = one.read_bytes()
        if how == "swap" and other.read_bytes() == data:
            continue
        change(rng, how, one, other)
        done[how] += 1
        said = problem(path, whole)
        if said:
            found.append(f"{number} {how} {one.relative_to(path)}: {said}")
            print(found[-1], file=sys.stderr, flush=True)
        one.write_bytes(data)
    shutil.rmtree(path)
    return done, found
