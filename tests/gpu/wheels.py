"""`python -m tests.gpu.wheels DIR [--python 3.12]`: the folder of wheels for `--wheels`.

What `make test-gpu` imports beside torch and NumPy, with the versions of constraints.txt, for
CPython 3.11 to 3.13 on x86-64 Linux (manylinux): whatever Python runs this. It needs a network;
the folder does not. torch, NumPy and what only some part of ddpprobe imports that the command does
not run are left out, so that all of it stays below 40 MiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
LIMIT_MIB = 40
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TESTS = ("pytest>=8", "hypothesis>=6.100")
LEFT_OUT = ("numpy", "torch")  # whoever has the one has the other


def main(argv: list[str] | None = None) -> int:
    """Download; 1 if the folder is too large."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.gpu.wheels", description=__doc__, formatter_class=about
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--python", choices=PYTHONS, default="3.12", help="default: %(default)s")
    parser.add_argument("--with", dest="more", action="append", default=[], metavar="NAME",
                        help="one more package, such as numpy or wandb")  # fmt: skip
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        download(Path(scratch), args.python, args.more)
        for wheel in sorted(Path(scratch).glob("*.whl")):
            if name_of(wheel) not in LEFT_OUT or name_of(wheel) in args.more:
                (args.directory / wheel.name).write_bytes(wheel.read_bytes())
    return report(args.directory)


def download(target: Path, python: str, more: list[str]) -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["dependencies"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(target)]
    command += ["--constraint", str(HOME / "constraints.txt"), "--implementation", "cp"]
    command += ["--python-version", python, "--abi", f"cp{python.replace('.', '')}"]
    command += ["--abi", "abi3", "--abi", "none"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *project, *TESTS, *more], check=True)


def name_of(wheel: Path) -> str:
    return wheel.name.split("-")[0].lower().replace("_", "-")


def report(directory: Path) -> int:
    """Print what is in a folder; return 1 if that is more than may be carried."""
    total = 0.0
    for wheel in sorted(directory.glob("*.whl")):
        size = wheel.stat().st_size / 2**20
        total += size
        print(f"{size:6.2f} MiB  {wheel.name}")
    print(f"{total:6.2f} MiB  {directory}, of {LIMIT_MIB} at most")
    return int(total > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
