"""What a Python with torch lacks, from a folder of wheels, for as long as a command runs.

Nothing of that Python is changed, and torch and NumPy are never replaced: only what is not
there, or is too old for another wheel, goes to a directory of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).resolve().parents[2]
KEPT = ("torch", "numpy", "triton")  # also where the folder holds them
KEPT_PREFIXES = ("nvidia-", "cuda-")


@contextlib.contextmanager
def packages(wheels: Path | None) -> Iterator[list[str]]:
    """Install what is missing from `wheels`, if given; yield directories for PYTHONPATH.

    Raises:
        SystemExit: the folder holds no wheels, or pip cannot install them.
    """
    with tempfile.TemporaryDirectory(prefix="ddpprobe-wheels-") as target:
        if wheels is not None:
            there = found_in(wheels)
            if not there:
                raise SystemExit(
                    f"no wheels in {wheels}: python -m tests.gpu.wheels makes such a folder"
                )
            names = wanted(there)
            if names:
                pip_install(names, wheels, target)
            print(f"installed from {wheels}: {', '.join(sorted(names)) or 'nothing was missing'}")
        if not installed("ddpprobe"):
            describe_source(Path(target))
        sys.path.insert(1, target)
        importlib.invalidate_caches()
        try:
            yield [str(HOME), target]
        finally:
            sys.path.remove(target)


def describe_source(target: Path) -> None:
    """Say of the source tree what pip says of an installed package: `ddpprobe report` asks."""
    version = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["version"]
    folder = target / f"ddpprobe-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddpprobe\nVersion: {version}\n")


def found_in(wheels: Path) -> dict[str, Path]:
    """Return the wheels of a folder by the names of their distributions."""
    return {canonical(path.name.split("-")[0]): path for path in sorted(wheels.glob("*.whl"))}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def wanted(there: Mapping[str, Path]) -> set[str]:
    """Return which distributions of a folder are missing here or older than they must be."""
    kept = {n for n in there if n in KEPT or n.startswith(KEPT_PREFIXES)}
    names = {n for n in there if n not in kept and not installed(n)}
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["dependencies"]
    asked = [*project, *(line for name in names for line in requirements(there[name]))]
    parse = _requirements_module()
    if parse is None:
        return names
    for line in asked:
        need = parse.Requirement(line)
        name, here = canonical(need.name), installed(canonical(need.name))
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if applies and here and name in there and name not in kept and here not in need.specifier:
            names.add(name)
    return names


def installed(name: str) -> str:
    """Return the version of a distribution, "" if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel says that it needs."""
    with zipfile.ZipFile(wheel) as file:
        name = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        text = file.read(name).decode()
    return HeaderParser().parsestr(text).get_all("Requires-Dist") or []


def _requirements_module() -> ModuleType | None:
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


def pip_install(names: set[str], wheels: Path, target: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--find-links", str(wheels), "--target", target]
    done = subprocess.run([*command, *sorted(names)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip cannot install from {wheels}:\n{done.stderr[-2000:]}")
