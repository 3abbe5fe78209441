"""The wheel as a user gets it: built, installed with each extra into a new environment, used.

    python -m tests.wheel [EXTRA ...]

Without names: the package alone and every extra of pyproject.toml. For each one the package is
installed from the wheel, with the versions of constraints.txt; nothing of this repository is on the
path, and it reads the golden store. What an extra is for must say `ddpprobe[EXTRA]` without it and
work with it; after `pip uninstall` no file named after ddpprobe may be left in the environment, and
in the home directory only its cache. It needs a package index, and takes a minute for each; the
exit code is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from . import golden_store

ROOT = Path(__file__).parents[1]
PLAIN = "plain"
# What each extra is for. The run of the golden store is the first argument. Exit code 4: its second
# attempt was cut off, and nothing tells how it ended.
OPEN = "import sys, ddpprobe; run = ddpprobe.open(sys.argv[1]);"
USES = {
    "train": (
        "import torch, ddpprobe, sys; m = torch.nn.Linear(2, 2);"
        "o = torch.optim.SGD(m.parameters(), lr=.1);"
        "p = ddpprobe.install(m, every=1, run_dir=sys.argv[2]);"
        "m(torch.ones(1, 2)).sum().backward(); o.step(); p.close();"
        "assert ddpprobe.open(sys.argv[2]).series('*', 'numel').steps.tolist() == [0]"
    ),
    "xarray": f"{OPEN} assert run.to_xarray().sizes['step']",
    "dask": f"{OPEN} assert run.to_xarray(chunks={{}}).unify_chunks().chunks",
    "pandas": f"{OPEN} assert len(run.to_pandas())",
    "polars": f"{OPEN} assert len(run.to_polars())",
    "plot": f"{OPEN} assert run.plot('*', 'rms')",
    "parquet": (
        "import sys; from ddpprobe.cli.main import main;"
        "sys.exit(main(['export', sys.argv[1], '--format', 'parquet', '-o', sys.argv[2]]) != 4)"
    ),
    "web": (
        "import pathlib, sys; from ddpprobe.daemon.web_config import read;"
        "file = pathlib.Path(sys.argv[2]); file.write_text('basic_auth_users: {a: ' + '$2b$10$'"
        " + 53 * 'a' + '}'); assert read(file).users"
    ),
    "cloud": "import ddpprobe.store.remote.bucket as b; assert b",
}
SAYS_WITHOUT = {"xarray", "dask", "pandas", "polars", "plot", "parquet"}
# What must be in the wheel besides the modules.
DATA = (
    "ddpprobe/py.typed", "ddpprobe/rank/stats/native.cpp", "ddpprobe/stack/rules/ddpprobe.yml",
    "ddpprobe/stack/alertmanager/alertmanager.yml", "ddpprobe/stack/prometheus/prometheus.yml",
    "ddpprobe/stack/dashboards/ddpprobe-run.json", "ddpprobe/stack/runbooks/DdpprobeStuck.md",
)  # fmt: skip
STRANGE = ("tests/", "docs/", "launch/", "benchmarks/", "grafana/")


def extras() -> dict[str, list[str]]:
    """Return what each extra of the project installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(project["optional-dependencies"])


def built(into: Path) -> Path:
    """Build the wheel; return its path."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(into), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = into.glob("ddpprobe-*.whl")
    return wheel


def wrong_inside(wheel: Path) -> list[str]:
    """Return what is missing in a wheel, and what has no place there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = [f"the wheel lacks {name}" for name in DATA if name not in names]
    return missing + [f"the wheel holds {n}" for n in sorted(names) if n.startswith(STRANGE)]


class Environment:
    """A virtual environment, with a home directory and a working directory of its own."""

    def __init__(self, place: Path) -> None:
        self.home, self._venv = place / "home", place / "venv"
        self.home.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._venv], check=True)
        self._python = self._venv / "bin" / "python"

    def pip(self, *words: str) -> None:
        """Run this environment's pip on that one."""
        pip = [sys.executable, "-m", "pip", "--python", str(self._python)]
        environment = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        subprocess.run([*pip, *words, "-q"], env=environment, check=True)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run its Python away from the repository."""
        kept = {k: v for k, v in os.environ.items() if k in {"PATH", "LANG", "TMPDIR"}}
        environment = kept | {
            "HOME": str(self.home), "DDPPROBE_LINGER": "0", "DDPPROBE_SD_DIR": "",
            "DDPPROBE_SERVICE": "", "DDPPROBE_LISTEN": "127.0.0.1:0", "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
        }  # fmt: skip
        return subprocess.run(
            [self._python, *words], cwd=self.home, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    def left(self) -> list[Path]:
        """Return what is named after ddpprobe, but for the cache (docs/how-to/upgrade.md)."""
        cache = self.home / ".cache" / "ddpprobe"
        found = [p for place in (self._venv, self.home) for p in place.rglob("*ddpprobe*")]
        return sorted(p for p in found if not p.is_relative_to(cache))


def wrong_plain(environment: Environment, run: Path) -> list[str]:
    """Return what does not work without any extra."""
    wrong = []
    for words, expected, code in (
        (("--version",), "ddpprobe 0", 0),
        (("--help",), "anomalies", 0),
        (("info", str(run)), "attempt 1", 4),
        (("up", str(environment.home / "stack"), "--no-start"), "stack", 0),
    ):
        done = environment.run("-m", "ddpprobe", *words)
        if expected not in done.stdout or done.returncode != code:
            wrong.append(f"{words}: exit code {done.returncode}: {done.stdout}{done.stderr}")
    torch = environment.run("-c", "import ddpprobe, sys; sys.exit('torch' in sys.modules)")
    if torch.returncode:
        wrong.append("import ddpprobe imports torch")
    for extra in sorted(SAYS_WITHOUT):
        done = environment.run("-c", USES[extra], str(run), str(environment.home / "out"))
        if "pip install 'ddpprobe[" not in done.stderr or not done.returncode:
            wrong.append(f"without {extra} it does not say what to install: {done.stderr[-500:]}")
    return wrong


def wrong_with(extra: str, wheel: Path, place: Path) -> list[str]:
    """Install the wheel with an extra into a new environment, use it, remove it."""
    environment = Environment(place)
    run = golden_store.unpack(1, place)
    environment.pip("install", str(wheel) if extra == PLAIN else f"{wheel}[{extra}]")
    if extra == PLAIN:
        wrong = wrong_plain(environment, run)
    else:
        done = environment.run("-c", USES[extra], str(run), str(place / "out"))
        wrong = [f"[{extra}]: {done.stdout}{done.stderr}"] if done.returncode else []
    environment.pip("uninstall", "-y", "ddpprobe")
    stack = environment.home / "stack"
    return wrong + [f"left: {p}" for p in environment.left() if not p.is_relative_to(stack)]


def main() -> int:
    """Try what is named, or everything; say how each went."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel")
    parser.add_argument("extra", nargs="*", choices=[PLAIN, *USES, []], metavar="EXTRA")
    named = parser.parse_args().extra or [PLAIN, *USES]
    with tempfile.TemporaryDirectory() as folder:
        wheel = built(Path(folder))
        problems = wrong_inside(wheel)
        size = f"{wheel.stat().st_size / 1e6:.1f} MB"
        print(f"{wheel.name}, {size}: {'; '.join(problems) or 'right'}", flush=True)
        for extra in named:
            found = wrong_with(extra, wheel, Path(folder) / extra)
            print(f"{extra}: {'; '.join(found) or 'right'}", flush=True)
            problems += found
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
