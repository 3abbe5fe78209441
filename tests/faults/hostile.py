"""Runs as a stranger may send them, and what everything that reads must make of them.

As a script, `hostile.py SCRATCH ODDITIES SEED [MOST [GROUP]]`, it makes all (or so many) of them
one after the other and prints a line of JSON for each that fails, and one at the end: it is a
process of its own, so that its memory can be measured. GROUP is a key of `hostile_asked.GROUPS`.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults import hostile_captures as captures
from tests.faults import hostile_cases as made
from tests.faults.hostile_asked import GROUPS, Heard, problems_of

MEMORY_BYTES = 512 << 20


def cases(oddities: int, group: str = "more") -> Iterator[tuple[str, made.Case]]:
    """Yield all cases by name, the oddities `oddities` times each."""
    if group != "torch":  # which reads captures only
        yield from made.links()
        yield from made.FORGED.items()
        yield "captured: a sparse pack", captures.sparse  # whoever asks for all of it gets it
    yield from captures.links()
    yield from captures.FORGED.items()
    drawn = captures.ODDITIES if group == "torch" else {**made.ODDITIES, **captures.ODDITIES}
    for name, case in drawn.items():
        yield from ((f"{name} {i}", case) for i in range(oddities))


def main(scratch: Path, oddities: int, seed: int, most: int = 0, group: str = "more") -> int:
    """Go through the cases; a line for each that failed, and one at the end with the memory."""
    model, out, failed, done = scratch / "model", scratch / "out", 0, 0
    out.mkdir()
    tempfile.tempdir = str(out)
    heard = Heard(out)
    captures.make(model)
    before = list(problems_of(model, model, out, "odd ", heard, GROUPS[group]))  # imports, too
    if before:
        print(json.dumps({"case": "none", "problems": before}), flush=True)
    sys.addaudithook(heard)
    chosen = dict(cases(oddities, group))
    drawn = random.Random(seed).sample(sorted(chosen), most) if most else chosen
    for name in dict.fromkeys(("names", *drawn)):  # where everything can be read
        case = chosen[name]
        run, outside = scratch / "run", scratch / "outside"
        shutil.copytree(model, run)
        outside.mkdir()
        case(run, outside, random.Random(f"{seed} {name}"))
        found = list(problems_of(run, model, outside, name, heard, GROUPS[group]))
        if found:
            print(json.dumps({"case": name, "problems": found}), flush=True)
        failed, done = failed + bool(found), done + 1
        shutil.rmtree(run)
        shutil.rmtree(outside)
    # Not getrusage, whose peak is that of whoever forked this process, if that was larger.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    total = {"cases": done, "failed": failed + bool(before), "peak_bytes": peak}
    print(json.dumps(total), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:6]))
