"""The tutorial: its script, its commands and what they print, carried out as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.rundir.paths import is_locked

from .timed import TIMED, untimed, untimed_text

HOME = Path(__file__).parent.parent
PAGE = HOME / "docs/tutorial/first-nan.md"
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODES = {"anomalies runs/first": 1}  # a page


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(PAGE.read_text()) if found == kind]


def commands() -> list[tuple[str, str]]:
    """Return each command of the page and what is printed below it."""
    prompt = re.compile(r"^\$ ", re.MULTILINE)
    parts = [part for text in blocks("console") for part in prompt.split(text)[1:]]
    return [(words, printed) for words, _, printed in (part.partition("\n") for part in parts)]


def mended(script: str, changes: list[str]) -> str:
    """Put each changed line in the place of the one that begins as it does."""
    for change in changes:
        begin = change.partition("(" if "install" in change else "norm")[0]
        (old,) = [line for line in script.splitlines() if line.startswith(begin)]
        script = script.replace(old, change.rstrip("\n"))
    return script


def of_a_quiet_machine(lines: list[str]) -> list[str]:
    """Leave out the lines of a verdict that a busy machine makes true."""
    quiet = [
        untimed_text(line) for line in lines if not any(f" {name}: " in line for name in TIMED)
    ]
    if len(quiet) == 1 < len(lines):
        return [line.replace("judged:", "no anomalies in") for line in quiet]
    return quiet


def is_over(run: Path) -> bool:
    """Whether the daemon, which may begin after the end of so short a training, is done."""
    if is_locked(run / "daemon/node_0000.lock"):
        return False
    return all(attempt["sealed"] for attempt in ddpprobe.open(run).info()["attempts"])


def test_what_the_page_prints_is_what_a_reader_sees(torchrun, call, poll, tmp_path, monkeypatch):
    script, *changes = blocks("python")
    assert len(changes) == 2
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(script)
    seen = []
    for words, expected in commands():
        if words.startswith("torchrun"):
            name = "fixed" if seen else "first"
            done = torchrun(file, 2, {"DDPPROBE_LISTEN": "127.0.0.1:0", "DDPPROBE_LINGER": "0"})
            assert done.returncode == 0, done.stderr
            poll(lambda n=name: is_over(tmp_path / "runs" / n), 60)
            printed = done.stdout
            file.write_text(mended(script, changes))
        else:
            command = words.removeprefix("ddpprobe ")
            code, printed, said = call(*command.split())
            assert code == CODES.get(command, 0), said
        seen.append(words)
        lines = [line.split() for line in expected.splitlines()]
        shown = [line.split() for line in of_a_quiet_machine(printed.splitlines())]
        if lines[-1:] == [["..."]]:
            lines.pop()
            del shown[len(lines) :]
        assert shown == lines or not lines, words
    assert sum(words.startswith("torchrun") for words in seen) == 2
    (page,) = untimed(ddpprobe.open("runs/first").anomalies())
    assert f"on rank {page.rank} at step {page.step}" in PAGE.read_text()  # of the picture


@pytest.mark.parametrize("change", [1, 2])
def test_a_change_takes_the_place_of_the_line_that_it_mends(change):
    script, *changes = blocks("python")
    assert mended(script, changes).count(changes[change - 1].strip()) == 1
    assert changes[change - 1].strip() not in script


def test_what_a_busy_machine_adds_to_a_first_cause_is_left_out() -> None:
    cause = "PAGE  step 63 rank 1  nonfinite: 16 NaN of 1024 elements"
    slow = "straggler at step 26 (rank 1)"
    for said in (slow, "slowdown at step 30", f"slowdown at step 30, {slow}"):
        line = f"{cause}; warned of before it: {said} (first cause)"
        assert of_a_quiet_machine([line]) == [f"{cause} (first cause)"]
    true = f"{cause}; warned of before it: grad_spike at step 60, {slow} (first cause)"
    assert of_a_quiet_machine([true]) == [true]
