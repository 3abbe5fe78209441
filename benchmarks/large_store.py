"""A store as large as a long training run leaves it, made in a minute without training.

The statistics of the first blocks are drawn, encoded and written as the daemon does it; the blocks
after them are hard links to these files, with a manifest that lists each of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddpprobe.records.step import Anomaly, FirstBad, Site, StepRecord
from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import format as fmt
from ddpprobe.store.columns import (
    LabelAxis,
    SiteAxis,
    digest_columns,
    encode_checksums,
    encode_disputes,
    encode_rows,
    encode_scalars,
    site_columns,
    step_columns,
)
from ddpprobe.store.commit import Files, GroupWriter
from ddpprobe.store.event_fold import anomaly_columns
from ddpprobe.store.root import Root

EVERY, DRAWN, PARAMETERS = 10, 3, 8
NODE = paths.node_name(0)
KINDS = ("output", "grad_output", "grad_local", "grad", "param")


def make(path: Path, *, steps: int, sites: int, ranks: int, told: bool = True) -> RunDir:
    """Write a sealed run of `steps` sampled steps; the last but 90 steps is where a NaN comes up.

    Args:
        path: must not exist.
        steps: sampled steps.
        sites: of each rank.
        ranks: of one node.
        told: the daemon's verdicts are recorded, and that it saw the end.
    """
    run = RunDir(paths.make_dir(path))
    identity = {
        "format_version": 1, "run_id": "large", "name": "large", "world_size": ranks, "nodes": 1,
        "created_ns": 10**18, "every": EVERY, "wrapper": "ddp", "torch": "2", "backend": "nccl",
    }  # fmt: skip
    paths.write_json(run.run_json, identity)
    meta = {**identity, "node": NODE, "attempt": 0, "device": "cuda", "pid": 1}
    bad = FirstBad(EVERY * (steps - 90), 0, "backward", 7, 3 % ranks, "blocks.3.mlp", "grad_output")
    for name in (paths.rank_name(0), "merged"):
        _Filler(run, name, meta, sites, ranks).fill(steps, replace(bad, nan=3, numel=4096))
    _same_for_all(run, ranks)
    if told:
        _tell(run, meta, ranks, bad)
    root = Root(run, durable=False)
    root.prepare(0)
    root.seal()
    return run


class _Filler:
    """Appends blocks to one group."""

    def __init__(
        self, run: RunDir, name: str, meta: dict[str, Any], sites: int, ranks: int
    ) -> None:
        self._merged = name == "merged"
        self._ranks = range(ranks) if self._merged else range(1)
        self._sites = tuple(
            Site(f"blocks.{i // len(KINDS)}.mlp", KINDS[i % len(KINDS)], dtype="bfloat16")
            for i in range(sites)
        )
        self._rng = np.random.default_rng(len(name))
        self._axes = SiteAxis(), LabelAxis[str](), LabelAxis[int](), LabelAxis[tuple[str, str]]()
        self._group = GroupWriter(run, f"{fmt.attempt_key(0)}/{name}", durable=False)
        kind = "merged" if self._merged else "rank"
        self._group.define(
            {"kind": kind, "attempt": 0, "meta": meta}, fmt.chunk_sizes(sites, ranks)
        )
        self._chunks: list[dict[str, bytes]] = []
        self._files = _linking(self._group)

    def fill(self, steps: int, bad: FirstBad) -> None:
        """Append `steps` rows, block by block; one of them has seen `bad`."""
        for start in range(0, steps, fmt.BLOCK):
            block = min(fmt.BLOCK, steps - start)
            labels = [self._label(EVERY * (start + i), bad) for i in range(block)]
            if block < fmt.BLOCK or len(self._chunks) < DRAWN:
                self._chunks.append(self._draw(labels, start))
            else:
                self._repeat(self._chunks[start // fmt.BLOCK % DRAWN], start // fmt.BLOCK)
                self._group.sizes["step"] = start
            self._group.append("step", step_columns(labels))
            self._group.commit()

    def _label(self, step: int, bad: FirstBad) -> StepRecord:
        seen = bad if step == bad.step and (self._merged or bad.rank == 0) else None
        return StepRecord(0, step, tuple(self._ranks), 10**18 + step, first_bad=seen)

    def _draw(self, labels: Sequence[StepRecord], start: int) -> dict[str, bytes]:
        records = [self._record(label) for label in labels]
        sites, names, ranks, digests = self._axes
        known = len(sites.sites)
        arrays = encode_rows(records, sites)
        cells = encode_scalars(records, names, ranks)
        if not known:
            self._group.append("site", site_columns(sites.sites))
            self._group.append("scalar", {"scalar": names.labels})
        if self._merged:
            cells["desync_json"] = encode_disputes(records)
            if not known:
                self._group.append("rank", {"rank": ranks.labels})
        else:
            cells = {name: cells[name][:, 0] for name in ("scalars", "scalar_given")}
            cells |= encode_checksums(records, digests)
            if not known:
                self._group.append("digest", digest_columns(digests.labels))
        arrays |= cells
        for name, data in arrays.items():
            self._group.put(name, (start, *[0] * (data.ndim - 1)), data)
        staged = self._group._staged  # noqa: SLF001  (what the writer has just encoded)
        return {key: data for key, data in staged.items() if key.partition("/")[0] in arrays}

    def _repeat(self, chunks: dict[str, bytes], block: int) -> None:
        for key, data in chunks.items():
            name, _, where = key.partition("/c/")
            place = "/".join((str(block), *where.split("/")[1:]))
            self._group._staged[f"{name}/c/{place}"] = data  # noqa: SLF001

    def _record(self, label: StepRecord) -> StepRecord:
        n, rng = len(self._sites), self._rng
        counts = np.zeros((n, 7), np.int64)
        counts[:, 0] = 1 << 20 | np.arange(n) % 7 << 10
        counts[:, 4] = rng.integers(0, 100, n)
        counts[:, 5:] = 1
        values = rng.standard_normal((n, 4))
        values[:, 3] = values[:, 3] ** 2 * counts[:, 0]
        numbers = {"loss": 2.0, "grad_norm_local": 1.0, "grad_norm": 1.0, "micro_batches": 1.0}
        noise = dict(zip(numbers, rng.standard_normal(4), strict=True))
        given = {r: {k: noise[k] + x for k, x in numbers.items()} for r in self._ranks}
        keys = [(f"blocks.{i}.mlp.weight", "") for i in range(PARAMETERS)]
        digests = {key: {label.step: 1} for key in keys}
        return replace(
            label, sites=self._sites, counts=counts, values=values, scalars=given,
            digests={} if self._merged else digests,
        )  # fmt: skip


def _linking(group: GroupWriter) -> Files:
    """Make a group's files write what they have written before as a hard link."""
    files: Files = group._files  # noqa: SLF001
    write, first = files._write_new, dict[int, tuple[bytes, Path]]()  # noqa: SLF001

    def link(keys: Sequence[str], staged: Mapping[str, bytes]) -> None:
        for key in keys:
            path, data = files.root / key, staged[key]
            if id(data) in first and "/c/" in key:
                paths.make_dir(path.parent)
                os.link(first[id(data)][1], path)
            else:
                write([key], staged)
                if "/c/" in key:
                    first[id(data)] = data, path  # held, so that no other bytes have their id

    files._write_new = link  # type: ignore[method-assign]  # noqa: SLF001
    return files


def _same_for_all(run: RunDir, ranks: int) -> None:
    """Give every rank the group of rank 0, as hard links."""
    top = fmt.attempt_key(0)
    for rank in range(1, ranks):
        name = paths.rank_name(rank)
        old, new = run.store / top / paths.rank_name(0), run.store / top / name
        shutil.copytree(old, new, copy_function=os.link)
        log = run.path / "manifest" / f"{top}.{paths.rank_name(0)}.log"
        shutil.copy(log, log.with_name(f"{top}.{name}.log"))


def _tell(run: RunDir, meta: dict[str, Any], ranks: int, bad: FirstBad) -> None:
    top = fmt.attempt_key(0)
    page = Anomaly(
        "nonfinite", "page", bad.step, 0, bad.rank, bad.fqn, bad.kind, "backward",
        first_cause=True, message="3 NaN of 4096 elements", values={"nan": 3.0}, sampled=True,
        wall_time_ns=10**18,
    )  # fmt: skip
    group = GroupWriter(run, f"{top}/anomalies", durable=False)
    group.define({"kind": "anomalies", "attempt": 0}, {})
    group.append("anomaly", anomaly_columns([page]))
    group.commit()
    group = GroupWriter(run, f"{top}/{NODE}", durable=False)
    group.define({"kind": "node", "attempt": 0, "meta": meta}, {})
    said = [(paths.rank_name(r), '{"event":"closed","status":"ok"}') for r in range(ranks)]
    said += [("daemon", '{"event":"finished"}'), ("daemon", '{"event":"sealed"}')]
    group.append(
        "event",
        {
            "event_source": [name for name, _ in said],
            "event_seq": list(range(len(said))),
            "event_json": [text for _, text in said],
        },
    )
    group.append("sample", {"sample_time": [1], "sample_json": ['{"time_ns":1}']})
    group.commit()
