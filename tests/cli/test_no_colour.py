"""NO_COLOR: no verb colours anything, on a terminal or off it; and without it they may."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from ddpprobe.cli.verbs import VERBS

from ..made_runs import Made

COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
ESCAPE = b"\x1b"
RUN = "ddpprobe-runs/run"
LINES = {
    "ls": [], "info": [RUN], "anomalies": [RUN], "trace": [RUN, "--plot"], "verify": [RUN],
    "collect": ["merged", RUN], "compare": [RUN, RUN],
    "baseline": [RUN, RUN, RUN], "top": [RUN, "--once"], "replay": [RUN],
    "report": [RUN, "-o", "page.html"], "export": [RUN, "--format", "csv"], "trigger": [RUN],
    "run": ["--"], "daemon": ["--dir", "nowhere"], "up": ["stack", "--no-start"],
}  # fmt: skip
# All of them in one process, each with the progress bar that a slow one would have.
SCRIPT = """
import sys
from ddpprobe.cli import main, progress
progress.APPEARS_SECONDS = -1.0
for line in sys.stdin.read().splitlines():
    words = line.split()
    print(f"== {words[0]}", flush=True)
    main.main(words)
    sys.stdout.flush()
main.main(["--help"])
"""


def on_a_terminal(directory: Path, lines: list[str], **environ: str) -> bytes:
    """Return what command lines write on a terminal that knows colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    without = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "DDPPROBE_DIR"}}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
        cwd=directory, env={**without, "TERM": "xterm-256color", **environ},
    )  # fmt: skip
    os.close(theirs)
    said: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # its last writer has gone
                return
            said.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    process.communicate("\n".join(lines).encode())
    reader.join()
    os.close(ours)
    assert process.returncode == 0, b"".join(said).decode()
    return b"".join(said)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    Made(tmp_path / RUN).whole(5).close()
    return tmp_path


def test_with_no_color_no_verb_colours_anything(here: Path) -> None:
    assert LINES.keys() == VERBS.keys()
    lines = [" ".join([verb, *words]) for verb, words in LINES.items()]
    said = on_a_terminal(here, lines, NO_COLOR="1")
    for part in re.split(rb"(?m)^== ", said)[1:]:
        assert not COLOUR.search(part), part
    assert said.count(b"== ") == len(LINES)


def test_without_it_a_plot_on_a_terminal_has_colours(here: Path) -> None:
    """So the test above can fail."""
    assert COLOUR.search(on_a_terminal(here, [f"trace {RUN} --plot"]))
    assert not COLOUR.search(on_a_terminal(here, [f"trace {RUN} --plot"], TERM="dumb"))


@pytest.mark.parametrize("verb", ["ls", "info", "trace", "top"])
def test_off_a_terminal_nothing_is_escaped(here: Path, verb: str) -> None:
    code = "import sys; from ddpprobe.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [verb, *LINES[verb]]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=here, capture_output=True, check=False,
        env={k: v for k, v in os.environ.items() if k != "DDPPROBE_DIR"} | {"FORCE_COLOR": ""},
    )  # fmt: skip
    assert ESCAPE not in done.stdout + done.stderr
    assert done.stdout
