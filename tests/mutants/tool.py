"""mutmut at work on a copy of the tree, one room at a time.

The tool writes a `mutants/` folder beside the code, with all mutants of a function in one file,
and forks a process for each that runs the tests which reach the function. It works on a copy here,
so a run that is cut off leaves nothing behind in the tree, and a later one goes on where it ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.rooms import Room

HOME = Path(__file__).parent.parent.parent
COPIES = HOME / ".mutants"
COPIED = ("ddpprobe", "tests", "grafana", "pyproject.toml")
# What the tool calls a mutant that no test was run for, and one that a run did not come to.
UNTESTED, UNCHECKED = "no tests", "not checked"
SURVIVED = ("survived", UNTESTED)
SECONDS_TO_END = 10.0
NOTHING = "no.such.mutant"  # asked for, it makes the tool write all mutants and try none

# The wait for a mutant that hangs: (seconds of its tests + constant) * multiplier.
SETTINGS = """[mutmut]
source_paths=ddpprobe
only_mutate=
{files}
do_not_mutate=
{left_out}
do_not_mutate_patterns=
    logger\\.
pytest_add_cli_args=
    -p
    no:cacheprovider
    -p
    tests.mutants.few_examples
{options}
pytest_add_cli_args_test_selection=
{tests}
timeout_constant=3.0
timeout_multiplier=8.0
"""


@dataclass(frozen=True)
class Mutant:
    """One change to one function.

    Attributes:
        name: the tool's, which changes when the function does.
        status: the tool's word.
        where: module and function, without `ddpprobe.`.
        was, now: the lines that the change took away and put there, without their indentation.
    """

    name: str
    status: str
    where: str = ""
    was: str = ""
    now: str = ""

    @property
    def survived(self) -> bool:
        """Whether no test noticed it."""
        return self.status in SURVIVED


class Workshop:
    """A copy of the tree in which one room is mutated."""

    def __init__(self, name: str, room: Room) -> None:
        self.directory = COPIES / name
        self._room = room

    def prepare(self) -> None:
        """Copy what is there now, and let the tool make its mutants of it.

        Raises:
            RuntimeError: the tests fail without a mutant, or the tool does.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source, target = HOME / name, self.directory / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        (self.directory / "setup.cfg").write_text(_settings(self._room))
        self._forget_who_reaches_what()
        done = self._tool("run", "--max-children", "1", NOTHING)
        if "nothing matches" not in done.stdout + done.stderr:
            text = "\n".join((done.stdout + done.stderr).replace("\r", "\n").splitlines()[-40:])
            raise RuntimeError(f"mutmut could not begin in {self.directory}:\n{text}")

    def _forget_who_reaches_what(self) -> None:
        """Have it found out anew which tests reach a function, if any test has changed.

        The tool asks that of new tests only: one that has been given more to do would not be run
        for the mutants which it notices now.
        """
        seen, now = self.directory / "tests.seen", _digest(self.directory / "tests")
        if not seen.exists() or seen.read_text() != now:
            (self.directory / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
            seen.write_text(now)

    def statuses(self) -> dict[str, str]:
        """Return what became of every mutant, by its name."""
        lines = self._tool("results", "--all", "True").stdout.splitlines()
        pairs = (line.strip().rpartition(": ") for line in lines)
        return {name: status for name, _, status in pairs if "__mutmut_" in name}

    @property
    def log(self) -> Path:
        """What the tool printed when it last ran."""
        return self.directory / "run.log"

    def try_(self, names: Sequence[str], jobs: int, seconds: float) -> bool:
        """Run the tests against these mutants; False if the time was up before the end."""
        command = [_program(), "run", "--max-children", str(jobs), *names]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.directory, env=_environment(), start_new_session=True,
                stdout=log, stderr=log,
            )  # fmt: skip
            try:
                return process.wait(seconds) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                _end(process)

    def describe(self, found: Mapping[str, str]) -> list[Mutant]:
        """Return mutants with the lines that they change."""
        return [described(n, s, self._tool("show", n).stdout) for n, s in found.items()]

    def _tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [_program(), *words], cwd=self.directory, env=_environment(), capture_output=True,
            text=True, check=False,
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the tool and its children, between two results rather than in the middle of one."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)


def _digest(folder: Path) -> str:
    """Return what stands for the text of all tests below a folder."""
    texts = (path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _program() -> str:
    return str(Path(sys.executable).parent / "mutmut")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _settings(room: Room) -> str:
    def lines(words: Iterable[str]) -> str:
        return "\n".join(f"    {word}" for word in words)

    return SETTINGS.format(
        files=lines(room.files),
        left_out=lines(room.left_out),
        tests=lines(f"tests/{name}" for name in room.tests),
        options=lines(("-k", f"not {room.without}") if room.without else ()),
    )


def described(name: str, status: str, shown: str) -> Mutant:
    """Read the tool's name of a mutant and its diff."""
    module, _, function = name.removeprefix("ddpprobe.").partition(".x")
    function = function.partition("__mutmut_")[0].removeprefix("_").strip("ǁ").replace("ǁ", ".")
    changes = {"-": list[str](), "+": list[str]()}
    for line in shown.splitlines():
        if line[:1] in changes and line[:3] not in ("---", "+++"):
            changes[line[0]].append(line[1:].strip())
    was, now = ("\n".join(changes[sign]) for sign in "-+")
    return Mutant(name, status, f"{module}.{function}", was, now)
