"""What a script opens where a descriptor of the probe was is the script's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpprobe.rundir.own_descriptor import OwnDescriptor
from ddpprobe.rundir.paths import DirectoryLock, is_locked
from ddpprobe.rundir.slot_file import SlotFile

SCRIPT = """
import os, sys
import torch
import ddpprobe

run, every, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
probe = ddpprobe.install(model, run_dir=run, every=every, daemon="none", budget=0.9)

def step():
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step()
if how == "forked":
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.closerange(3, 256)
files = [open(f"{run}-{i}", "wb", buffering=0) for i in range(40)]
for _ in range(600):
    step()
for file in files:
    file.write(b"mine")
probe.close()
for file in files:
    file.close()  # raises where somebody else did
    with open(file.name, "rb") as read:
        assert read.read() == b"mine", file.name
"""


@pytest.mark.parametrize(("every", "how"), [(1, "alone"), (100, "alone"), (1, "forked")])
def test_files_of_a_script_that_closes_all_descriptors_are_left_alone(
    every: int, how: str, tmp_path: Path, records_of
) -> None:
    script, run = tmp_path / "daemonize.py", tmp_path / "run"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, run, str(every), how],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if how == "alone":
        assert done.stderr.count("descriptors of the probe were closed") == 1
        steps = [r.step for r in records_of(run) if r.sampled]
        assert max(steps) > 99, "the journal goes on in a segment of its own"


def test_a_number_that_is_another_file_s_now_is_neither_written_to_nor_closed(tmp_path) -> None:
    slot_file = SlotFile(tmp_path / "slot", 4, clean=True)
    lock = DirectoryLock(tmp_path / "lock")
    assert lock.acquire()
    other = tmp_path / "other"
    other.write_bytes(b"")
    number = os.open(other, os.O_RDWR)
    for holder in (slot_file, lock):
        os.dup2(number, holder._file.number)
    assert not slot_file.write(b"told")
    taken = [number]
    slot_file.close()
    lock.release()
    assert other.read_bytes() == b""
    assert not is_locked(tmp_path / "lock")
    for fd in taken:
        os.close(fd)


def test_it_is_closed_once(tmp_path) -> None:
    held = OwnDescriptor(os.open(tmp_path, os.O_RDONLY))
    number = held.number
    assert held.is_ours()
    held.close()
    held.close()
    assert not held.is_ours()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
