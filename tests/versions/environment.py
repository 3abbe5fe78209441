"""A virtual environment of one Python and one torch, with what the tests import."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[2]
# Writing the stacks of a process that goes on can end it (CPython 3.11), so it is done later than
# pyproject.toml says: a compiler test takes minutes on a busy machine. In seconds.
_STUCK = 1200
# Of the tests' packages those that only pages, clouds and frameworks need, and the tests run here
# do not: some of them have no build for a Python that is new.
_LEFT_OUT = ("dask", "duckdb", "flask", "grafana", "ipykernel", "lightning", "moto", "nbclient")


@dataclass(frozen=True)
class Count:
    """How the tests of one run ended; `names` of those that failed."""

    passed: int
    skipped: int
    names: tuple[str, ...]
    code: int

    def __str__(self) -> str:
        failed = f"**{len(self.names)} failed**, " if self.names else ""
        odd = f" (exit code {self.code})" if self.code and not self.names else ""
        return f"{failed}{self.passed} passed, {self.skipped} skipped{odd}"

    @property
    def good(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.code == 0 and self.passed > 0


class Environment:
    """`.venv-py3.12-torch2.6`, beside the others of the Makefile."""

    def __init__(self, python: str, torch: str) -> None:
        self._version, self._torch = python, torch
        self.path = ROOT / f".venv-py{python}-torch{torch}"
        self._python = self.path / "bin" / "python"

    def make(self) -> None:
        """Install all of it anew; a second call finds it made.

        Raises:
            LookupError: this Python is not on this machine.
            subprocess.CalledProcessError: pip found no such torch, or no other package.
        """
        stamp = self.path / "made.stamp"
        if stamp.exists():
            return
        interpreter = find_python(self._version)
        self.remove()
        subprocess.run([interpreter, "-m", "venv", "--without-pip", self.path], check=True)
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text(pins())
            pip = [sys.executable, "-m", "pip", "--python", self._python, "install", "-q"]
            asked = ["-e", str(ROOT), f"torch=={self._torch}.*", *packages()]
            environment = os.environ | {"PIP_CONSTRAINT": str(constraints)}
            subprocess.run([*pip, *asked], env=environment, check=True)
        stamp.touch()

    def remove(self) -> None:
        """Take it off the disk: with a torch that was built for a GPU it is several GB."""
        shutil.rmtree(self.path, ignore_errors=True)

    def told(self) -> str:
        """Return the whole versions of its Python and its torch."""
        script = "import platform, torch; print(platform.python_version(), torch.__version__)"
        done = subprocess.run(
            [self._python, "-c", script], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def test(self, paths: tuple[str, ...], jobs: int) -> Count:
        """Run tests of this repository, `jobs` files at a time; what they print passes through."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.xml"
            words = ["-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "loadfile",
                     "-o", f"faulthandler_timeout={_STUCK}"]  # fmt: skip
            done = subprocess.run(
                [self._python, "-m", "pytest", *words, f"--junitxml={file}", *paths],
                cwd=ROOT, check=False,
            )  # fmt: skip
            return counted(file, done.returncode)


def counted(file: Path, code: int) -> Count:
    """Return what pytest has written into its file of results; nothing passed if there is none."""
    cases = list(ET.parse(file).getroot().iter("testcase")) if file.exists() else []
    skipped = sum(case.find("skipped") is not None for case in cases)
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    names = tuple(f"{c.get('classname')}::{c.get('name')}" for c in bad)
    return Count(len(cases) - skipped - len(bad), skipped, names, code)


def find_python(version: str) -> str:
    """Return the path of CPython `version` ("3.12"), on the PATH or of pyenv.

    Raises:
        LookupError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    for place in places:
        if place is not None:  # one of pyenv's is on the PATH, and fails, if it is not chosen
            done = subprocess.run(
                [place, "-c", script], capture_output=True, text=True, check=False
            )
            if done.stdout.strip() == version:
                return str(place)
    raise LookupError(f"there is no python{version} on the PATH, nor in {pyenv}")


def packages() -> list[str]:
    """Return what the tests of this command import, from pyproject.toml."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [p for p in groups["tests"] if not p.startswith(_LEFT_OUT)]


def pins() -> str:
    """Return constraints.txt without torch and what torch asks for: each release has its own."""
    asked = importlib.metadata.requires("torch") or []
    free = {"torch", *(name_of(line) for line in asked)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if name_of(line) not in free) + "\n"


def name_of(requirement: str) -> str:
    """Return the name in front of a requirement as an index spells it."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
