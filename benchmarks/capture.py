"""What keeping full tensors and steps costs: packs and folds against the raw disk."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numcodecs import Blosc
from numpy.typing import NDArray

from benchmarks import command_line, tables
from benchmarks.simulated import Model, meta
from ddpprobe.rank.stats import native
from ddpprobe.rank.stats.crc32 import crc32
from ddpprobe.rundir import tensor_pack
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir, make_dir, node_name, write_json
from ddpprobe.rundir.tensor_pack import PackedTensor
from ddpprobe.store.captures.fold import CaptureFold
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

RANKS, TENSORS = 2, 8
GOALS = {False: 0.5, True: 0.8}  # by whether both sides wait for the disk
NODE = node_name(0)
Timed = tuple[float, float]


def dense(count: int) -> NDArray[np.float32]:
    """Return what a GELU might hand out, float32 [count]: to compressors, activations are noise."""
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    return np.asarray(x / (1 + np.exp(-1.702 * x)), np.float32)


def parts(size: int) -> list[tuple[PackedTensor, NDArray[np.uint8]]]:
    """Return one rank's tensors, of `size` bytes together."""
    count = size // TENSORS // 4
    layout = {
        "kind": "dtensor", "ranks": list(range(RANKS)), "mesh": [RANKS],
        "shape": [RANKS * count], "axes": [["shard", 0, 1, ""]],
    }  # fmt: skip
    raw = dense(count).view(np.uint8)
    return [
        (PackedTensor("m", f"m.{i}.weight", "param", "", 0, 0, "float32", (count,), layout), raw)
        for i in range(TENSORS)
    ]


def header(rank: int, step: int) -> dict[str, object]:
    return {
        "attempt": 0, "step": step, "rank": rank, "world_size": RANKS, "wall_time_ns": 0,
        "reason": "capture", "dropped": 0, "modules": {"m": {"class": "M", "calls": []}},
    }  # fmt: skip


def write_raw(path: Path, buffers: Sequence[NDArray[np.uint8]]) -> None:
    """Write and rename, as plainly as it can be done."""
    made = path.with_suffix(".tmp")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    left = [b.data for b in buffers]
    while left:
        done = os.writev(fd, left)
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if left and done:
            left[0] = left[0][done:]
    os.close(fd)
    made.replace(path)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def rank_process(run: RunDir, rank: int, size: int) -> None:
    """Be one rank: do on each line of the standard input what it says, and answer the seconds."""
    native.prepare()  # as `install` does
    tensors = parts(size)
    raw = run.path / f"raw_{rank}"
    for line in sys.stdin:
        what, durable, step = line.split()
        path = raw if what == "raw" else run.pack(0, NODE, rank, int(step))
        path.unlink(missing_ok=True)  # a run replaces nothing, and to free pages takes time, too
        start = time.perf_counter()
        if what == "raw":
            write_raw(raw, [data for _, data in tensors])
        else:
            tensor_pack.write(path, header(rank, int(step)), tensors, crc32)
        if durable == "True":
            sync(path)
        print(time.perf_counter() - start, flush=True)


class Ranks:
    """Processes that write at the same time."""

    def __init__(self, run: RunDir, size: int) -> None:
        code = "import benchmarks.capture as c, pathlib as p; "
        code += f"c.rank_process(c.RunDir(p.Path({str(run.path)!r})), %d, {size})"
        self._all = [
            subprocess.Popen(
                [sys.executable, "-c", code % rank],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def do(self, what: str, *, durable: bool, step: int = 0) -> float:
        """Return the seconds of the slowest."""
        for one in self._all:
            assert one.stdin is not None
            one.stdin.write(f"{what} {durable} {step}\n")
            one.stdin.flush()
        return max(float(one.stdout.readline()) for one in self._all if one.stdout is not None)

    def close(self) -> None:
        for one in self._all:
            one.communicate()


def paired(rounds: int, ours: Callable[[], float], raw: Callable[[], float]) -> Timed:
    """Return the medians of raw / ours and of our seconds, each pair measured side by side."""
    ratios, seconds = [], []
    for turn in range(rounds + 1):
        if turn % 2:
            mine, theirs = ours(), raw()
        else:
            theirs, mine = raw(), ours()
        if turn:  # the first touches the pages
            ratios.append(theirs / mine)
            seconds.append(mine)
    return statistics.median(ratios), statistics.median(seconds)


def capture_rows(run: RunDir, size: int, rounds: int) -> list[Sequence[object]]:
    ranks = Ranks(run, size)
    total = RANKS * size
    rows: list[Sequence[object]] = []
    try:
        for durable in (False, True):
            ratio, seconds = paired(
                rounds,
                lambda d=durable: ranks.do("pack", durable=d),
                lambda d=durable: ranks.do("raw", durable=d),
            )
            goal = GOALS[durable]
            rows.append((
                f"write packs, fsync {'on both sides' if durable else 'on neither'}",
                f"{total / seconds / 2**20:.0f}", f"{ratio:.2f}", f">= {goal}",
                "yes" if ratio >= goal else "no",
            ))  # fmt: skip
        for durable in (False, True):
            ratio, seconds = paired(
                rounds,
                lambda d=durable: fold(run, ranks, durable=d),
                lambda d=durable: ranks.do("raw", durable=d),
            )
            text = f"fold them (one process), fsync {'on both sides' if durable else 'on neither'}"
            rows.append((text, f"{total / seconds / 2**20:.0f}", f"{ratio:.2f}", "", ""))
    finally:
        ranks.close()
    return rows


_STEPS = iter(range(1, 1 << 30))


def fold(run: RunDir, ranks: Ranks, *, durable: bool) -> float:
    """Let the ranks write packs, then return the seconds that their fold takes."""
    ranks.do("pack", durable=False, step=next(_STEPS))
    start = time.perf_counter()
    CaptureFold(run, Root(run, durable=durable), NODE, durable=durable).fold(0, final=True)
    seconds = time.perf_counter() - start
    assert not list((run.path / "captures").rglob("*.pack"))
    shutil.rmtree(run.store)
    shutil.rmtree(run.path / "manifest")
    return seconds


def codec_rows(size: int) -> list[Sequence[object]]:
    """Compare compressors on one tensor: how much smaller, and how fast."""
    data = dense(size // 4)
    rows: list[Sequence[object]] = []
    for name, shuffle in (("lz4", Blosc.BITSHUFFLE), ("zstd", Blosc.BITSHUFFLE)):
        codec = Blosc(cname=name, clevel=1 if name == "zstd" else 5, shuffle=shuffle)
        codec.encode(data[:1000])
        start = time.process_time()
        small = len(codec.encode(data))
        speed = data.nbytes / (time.process_time() - start) / 2**20
        rows.append((f"blosc {name}, bitshuffle", f"{data.nbytes / small:.2f}", f"{speed:.0f}"))
    return rows


def step_rows(directory: Path, steps: int) -> list[Sequence[object]]:
    """Append sampled steps of one rank to its journal, fold them, and count what they became."""
    run, model = RunDir(make_dir(directory)), Model()
    write_json(run.run_json, {"run_id": "simulated", "name": "simulated"})
    journal = JournalWriter(run.rank_journal(0, NODE, 0), meta(0, 1))
    records = [model.record(0, step) for step in range(steps)]
    took = []
    for record in records:
        start = time.perf_counter()
        journal.append_record(record)
        took.append((time.perf_counter() - start) * 1e3)
    journal.close()
    written = sum(p.stat().st_size for p in run.attempt_dir(0).rglob("*.wal"))
    start = time.perf_counter()
    StoreWriter(run, NODE).seal()
    folded = (time.perf_counter() - start) * 1e3 / steps
    files = [p.stat().st_size for p in run.store.rglob("*") if p.is_file()]
    row = 1500 * (7 * 8 + 4 * 8)
    return [
        ("append to the journal, ms", tables.spread(took)),
        ("fold, ms", f"{folded:.2f}"),
        ("bytes in the journal", f"{written / steps:.0f}"),
        ("bytes in the store", f"{sum(files) / steps:.0f} ({sum(files) / steps / row:.2f} of raw)"),
        (f"objects in the store after {steps} steps", len(files)),
    ]


def main(argv: Sequence[str] | None = None) -> str:
    """Measure; print and return the section."""
    arguments = command_line.parser("capture", __doc__).parse_args(argv)
    size, rounds, steps = (2 << 20, 1, 16) if arguments.quick else (128 << 20, 7, 1024)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        run = RunDir(make_dir(Path(name) / "run"))
        captures = capture_rows(run, size, rounds)
        per_step = step_rows(Path(name) / "steps", steps)
    one = tables.table(("what", "MiB/s", "raw time / its time", "goal", "holds"), captures)
    two = tables.table(("compressor", "ratio", "MiB/s of one core"), codec_rows(size // 4))
    three = tables.table(("per sampled step of one rank, 1,500 sites", "figure"), per_step)
    text = (
        f"{RANKS} processes write {size >> 20} MiB each at the same time, as packs of {TENSORS} "
        "tensors, and in the same round raw: the same bytes by writev into one file, which is "
        f"renamed. The slowest counts; medians of {rounds} pairs in either order. A pack is "
        "checksummed on the way, which raw bytes are not: where fsync costs next to nothing, as on "
        "the disk of a virtual machine, that is the difference. The fold reads and checks packs, "
        "writes chunks with two more checksums, and deletes the packs. Compressors on dense "
        "activations."
    )
    result = tables.section("Keeping full tensors, and steps", "capture", text, one, two, three)
    print(result)
    return result


if __name__ == "__main__":
    main()
