"""How the gather grows with the ranks: bytes, merge time, memory, series, store; 8 to 16,384."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import command_line, tables
from benchmarks.memory import anonymous
from benchmarks.simulated import PER_NODE, Model, meta
from ddpprobe.daemon.gather_queue import GatherQueue
from ddpprobe.detectors.suite import default_suite
from ddpprobe.ends.anomalies import TITLES
from ddpprobe.metrics.render import Exposition
from ddpprobe.metrics.table import SERIES_LIMIT
from ddpprobe.records.gather import Gather
from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.framing import Frame, NameTables
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir, make_dir, node_name, write_json
from ddpprobe.store.writer import StoreWriter

MODULES = 100
RANKS = (8, 64, 512, 4_096, 16_384)
STORED_RANKS = (8, 64, 512)
STORED_STEPS = 256  # a block
MIB, KIB = 2**20, 2**10
# What must hold, and how it is judged: (figure, largest that will do).
GOALS: dict[str, tuple[str, Callable[[list[float]], tuple[float, float]]]] = {
    "rank_bytes": ("constant (1 %)", lambda values: (max(values), 1.01 * min(values))),
    "series": (f"<= {SERIES_LIMIT:,}", lambda values: (max(values), SERIES_LIMIT)),
}


@dataclass
class Figures:
    """Of one sampled step at one number of ranks; bytes, CPU seconds."""

    ranks: int
    rank_bytes: float = 0.0
    node_bytes: float = 0.0
    node_seconds: float = 0.0
    head_bytes: float = 0.0
    take_seconds: float = 0.0
    merge_seconds: float = 0.0
    judge_seconds: float = 0.0
    memory: float = 0.0
    series: float = 0.0


def growth(ranks: Sequence[int], values: Sequence[float]) -> str:
    """Return b of the best fit values = a * ranks ** b, by least squares of the logarithms."""
    if len(ranks) < 2 or min(values) <= 0:
        return ""
    return f"{np.polyfit(np.log(ranks), np.log(values), 1)[0]:.2f}"


def block_of(record: StepRecord) -> bytes:
    """Return a record as a node pushes it to the head."""
    frames = [(table.type, table.payload) for table in framing.tables_of(record)]
    frames.append((framing.RECORD, framing.encode_record(record)))
    return b"".join(framing.encode_frame(t, seq, data) for seq, (t, data) in enumerate(frames))


def node_step(model: Model, node: int, world: int, found: Figures) -> bytes:
    """Write, read and merge what the ranks of one node say; return what it pushes."""
    ranks = range(node * PER_NODE, min((node + 1) * PER_NODE, world))
    known, payloads = NameTables(), []
    for rank in ranks:
        record = model.record(rank, 1)
        for table in framing.tables_of(record):
            known.take(Frame(table.type, 0, table.payload))
        payloads.append(framing.encode_record(record))
    found.rank_bytes = max(found.rank_bytes, len(payloads[-1]) + framing.HEADER.size)
    start = time.process_time()
    gather = Gather(ranks, judges=False)
    for payload in payloads:
        gather.add(framing.decode_record(payload, known), 0.0)
    (merged,) = gather.ready(0.0)
    block = block_of(merged)
    found.node_seconds += time.process_time() - start
    found.node_bytes = max(found.node_bytes, len(block))
    return block


def one_step(model: Model, world: int, directory: Path) -> Figures:
    """Gather one sampled step of so many ranks, from what they write to what the head makes."""
    found, nodes = Figures(world), -(-world // PER_NODE)
    gather_queue, gather = GatherQueue(directory), Gather(range(world))
    gather_queue.open(0, world, ())
    gather_queue.horizon(1)
    gc.collect()
    before = anonymous()
    for node in range(nodes):
        block = node_step(model, node, world, found)
        found.head_bytes += len(block)
        start = time.process_time()
        gather_queue.take(node_name(node), block)
        taken = time.process_time()
        for delivery in gather_queue.collect():
            assert isinstance(delivery, StepRecord)
            gather.add(delivery, 0.0, final=True)
        if node < nodes - 1:  # the daemon looks again and again
            gather.ready(0.0)
        found.take_seconds += taken - start
        found.merge_seconds += time.process_time() - taken
    found.memory = (anonymous() - before) * MIB
    start = time.process_time()
    (merged,) = gather.ready(0.0)
    found.merge_seconds += time.process_time() - start
    start = time.process_time()
    default_suite().update(merged)
    framing.encode_record(merged)
    found.judge_seconds = time.process_time() - start
    found.node_seconds /= nodes
    found.series = series_of(merged)
    gather_queue.discard()
    return found


def series_of(merged: StepRecord) -> int:
    """Return how many series the head's target has."""
    ranks = tuple(RankView(rank, rank, 1, "cpu", up=True) for rank in range(PER_NODE))
    view = NodeView(
        1, "simulated", "/runs/simulated", 0, node_name(0), len(merged.ranks), "2.13.0", "gloo",
        is_head=True, detectors=tuple(TITLES), ranks=ranks, merged=merged,
    )  # fmt: skip
    body = Exposition().render(view, openmetrics=False)
    return sum(not line.startswith(b"#") for line in body.splitlines())


def stored(model: Model, world: int, directory: Path) -> tuple[float, float, float]:
    """Store a block of steps at the head; return files, bytes and CPU s per sampled step.

    Of the ranks those of one node are stored here: every node stores its own. The merged records
    hold the numbers of all ranks.
    """
    run = RunDir(make_dir(directory / "run"))
    write_json(run.run_json, {"run_id": "simulated", "name": "simulated"})
    node = node_name(0)
    journals = [
        JournalWriter(run.rank_journal(0, node, rank), {**meta(rank, world), "pid": 0})
        for rank in range(PER_NODE)
    ]
    daemon = JournalWriter(run.daemon_journal(0, node), {**meta(0, world), "pid": 0})
    numbers = model.record(0, 0).scalars[0]
    for step in range(STORED_STEPS):
        gather = Gather(range(PER_NODE))
        for rank, journal in enumerate(journals):
            record = model.record(rank, step)
            journal.append_record(record)
            gather.add(record, 0.0)
        (merged,) = gather.ready(0.0)
        everybody = tuple(range(world))
        scalars = dict.fromkeys(everybody, numbers)
        daemon.append_record(replace(merged, ranks=everybody, scalars=scalars))
    writer = StoreWriter(run, node, durable=False)
    start = time.process_time()
    writer.seal()
    took = time.process_time() - start
    writer.close()
    files = [path for path in run.store.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return len(files) / STORED_STEPS, size / STORED_STEPS, took / STORED_STEPS


def main(argv: Sequence[str] | None = None) -> str:
    arguments = command_line.parser("scale", __doc__).parse_args(argv)
    model = Model(10 if arguments.quick else MODULES)
    ranks, kept = (RANKS[:2], STORED_RANKS[:1]) if arguments.quick else (RANKS, STORED_RANKS)
    with tempfile.TemporaryDirectory() as directory:
        one_step(model, 8, Path(directory) / "warm")
        steps = [one_step(model, world, Path(directory) / str(world)) for world in ranks]
    rows = []
    for title, field, unit in (
        ("a rank writes, KiB", "rank_bytes", KIB),
        ("a node pushes to the head, KiB", "node_bytes", KIB),
        ("a node reads and merges its ranks, CPU ms", "node_seconds", 1e-3),
        ("the head receives, MiB", "head_bytes", MIB),
        ("the head takes in (check, decode, write to its inbox), CPU ms", "take_seconds", 1e-3),
        ("the head merges, CPU ms", "merge_seconds", 1e-3),
        ("the head judges and encodes the merged record, CPU ms", "judge_seconds", 1e-3),
        ("memory of the head for a step under way, MiB", "memory", MIB),
        ("series of the head's target", "series", 1),
    ):
        values = [getattr(figures, field) for figures in steps]
        shown = [f"{v / unit:,.0f}" if v / unit > 99 else f"{v / unit:.1f}" for v in values]
        goal = GOALS.get(field)
        judged = ("", "") if goal is None else (goal[0], tables.verdict(*goal[1](values)))
        rows.append((title, *shown, growth(ranks[1:], values[1:]), *judged))
    header = ("per sampled step", *(f"{n:,} ranks" for n in ranks), "law", "goal", "holds")
    gathered = tables.table(header, rows)
    store_rows = []
    for world in kept:
        with tempfile.TemporaryDirectory() as directory:
            files, size, took = stored(model, world, Path(directory))
        figures = f"{files:.2f}", f"{size / KIB:.1f}", f"{took * 1e3:.1f}"
        store_rows.append((f"{world:,}", *figures))
    store = tables.table(
        ("ranks of the job", "files", "KiB", "CPU ms"),
        store_rows,
    )
    sites = len(model.values)
    text = (
        f"Simulated ranks, {PER_NODE} a node, {sites} sites and {len(model.parameters)} checksums "
        "each; what they write goes through the code of the daemons, in one process, without "
        "the network. *Law*: b of the best fit a x ranks^b from 64 ranks up; 0 is constant, 1 is "
        "linear. All of it is off the training's path. The store: what the head's node stores, "
        f"its own {PER_NODE} ranks and the merged records, per sampled step over {STORED_STEPS}."
    )
    result = tables.section("Scale", "scale", text, gathered, store)
    print(result)
    return result


if __name__ == "__main__":
    main()
