"""Blocks of Prometheus's own database, made of an OpenMetrics file by its own tool."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ddpprobe.errors import RunError

# promtool reads the whole file again for each block, so that there should be few of them. A block
# of the largest size that Prometheus itself makes is one of 31 days.
BLOCK_HOURS = 744
TICK_SECONDS = 0.2
NO_PROMTOOL = (
    "blocks are made by promtool, which is not on the PATH: install Prometheus (Debian: apt-get "
    "install prometheus), or take --format openmetrics to a machine that has it and run promtool "
    "tsdb create-blocks-from openmetrics FILE DIR there"
)


def find_promtool() -> str:
    """Return where promtool is.

    Raises:
        RunError: it is not there.
    """
    found = shutil.which("promtool")
    if found is None:
        raise RunError(NO_PROMTOOL)
    return found


def make_blocks(file: Path, directory: Path, tick: Callable[[], object] = lambda: None) -> int:
    """Turn an OpenMetrics file into blocks below a directory; return how many they are.

    Args:
        file: with timestamps, ending in `# EOF`.
        directory: it is made if it is not there.
        tick: called a few times a second while promtool is at work.

    Raises:
        RunError: there is no promtool, or it refuses the file.
    """
    command = [
        find_promtool(), "tsdb", "create-blocks-from", "openmetrics", "--quiet",
        f"--max-block-duration={BLOCK_HOURS}h", str(file), str(directory),
    ]  # fmt: skip
    before = set(blocks_in(directory))
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)  # noqa: S603  (no shell, own arguments)
        try:
            while process.poll() is None:
                tick()
                try:
                    process.wait(TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines() or ["no word"]
            raise RunError(f"promtool ended with {process.returncode}: {lines[-1]}")
    return len(set(blocks_in(directory)) - before)


def blocks_in(directory: Path) -> list[Path]:
    """Return the blocks of a directory, the oldest first."""
    return sorted(path.parent for path in directory.glob("*/meta.json"))
