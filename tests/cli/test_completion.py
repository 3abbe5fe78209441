"""A real bash completes verbs, options and runs; nobody else pays for that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddpprobe.cli.verbs import VERBS

from ..made_runs import Made

# What a user types once, then what bash does at a tab: it calls the function that was registered.
TAB = r"""
eval "$(register-python-argcomplete ddpprobe)"
complete -p ddpprobe > /dev/null || exit 3
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_KEY=9
read -ra COMP_WORDS <<< "$1"
[[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete ddpprobe "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


def tab(line: str, cwd: Path) -> set[str]:
    """Return what bash offers after a line."""
    bash = shutil.which("bash")
    assert bash is not None
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {k: v for k, v in os.environ.items() if k != "DDPPROBE_DIR"} | {"PATH": programs}
    done = subprocess.run(
        [bash, "--norc", "-c", TAB, "bash", line], capture_output=True, text=True, cwd=cwd,
        env=environ, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {word.strip() for word in done.stdout.splitlines() if word.strip()}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("gpt", "bert"):
        Made(tmp_path / "ddpprobe-runs" / name).whole(1).close()
    return tmp_path


def test_bash_offers_the_verbs(here: Path) -> None:
    assert tab("ddpprobe ", here) >= set(VERBS)
    assert tab("ddpprobe an", here) == {"anomalies"}


def test_bash_offers_the_options_of_the_verb_and_their_choices(here: Path) -> None:
    assert tab("ddpprobe anomalies --l", here) == {"--level"}
    assert tab("ddpprobe anomalies --level ", here) == {"page", "warn", "info"}
    assert tab("ddpprobe trace --sc", here) == {"--scalar"}


def test_bash_offers_the_options_of_the_daemon_which_are_its_own(here: Path) -> None:
    assert tab("ddpprobe daemon --max", here) == {"--max-bytes", "--max-age"}
    assert tab("ddpprobe daemon --", here) >= {"--dir", "--service", "--listen"}


def test_bash_offers_names_that_are_known_as_values(here: Path) -> None:
    assert tab("ddpprobe trace --stat m", here) == {"min", "max", "mean"}
    assert tab("ddpprobe trace --derived expert_i", here) == {"expert_idle"}
    assert tab("ddpprobe replay --detector non", here) == {"nonfinite"}


@pytest.mark.parametrize("line", ["ddpprobe info ", "ddpprobe compare ddpprobe-runs/gpt "])
def test_bash_offers_the_runs_where_one_is_due(here: Path, line: str) -> None:
    assert tab(line, here) >= {"ddpprobe-runs/gpt", "ddpprobe-runs/bert"}
    assert tab(f"{line}ddpprobe-runs/b", here) == {"ddpprobe-runs/bert"}
    assert tab(f"{line}ddpprobe-r", here) >= {"ddpprobe-runs/gpt", "ddpprobe-runs/"}


def test_nobody_else_imports_it(here: Path) -> None:
    source = (
        "import sys; from ddpprobe.cli.main import main; main(sys.argv[1:]);"
        "sys.exit('argcomplete' in sys.modules)"
    )
    for words in (["--help"], ["anomalies", "ddpprobe-runs/gpt"]):
        command = [sys.executable, "-c", source, *words]
        assert subprocess.run(command, cwd=here, capture_output=True, check=False).returncode == 0
