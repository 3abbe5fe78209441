"""Reading a run needs nothing that only Linux has: tried with all of that taken away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..made_runs import Made, record

# Third-party modules look at the platform while they are imported: they are there before.
ELSEWHERE = """
import os, sys, sysconfig, urllib.request, pathlib
import xarray, pandas, zarr
sysconfig.get_config_vars()
sys.platform = "darwin"
for name in ("O_PATH", "O_TMPFILE", "pidfd_open", "memfd_create", "sched_getaffinity",
             "posix_fadvise", "posix_fallocate", "splice", "fdatasync"):
    if hasattr(os, name):
        delattr(os, name)

run, out = sys.argv[1:]
place = os.path.dirname(out)

def hidden(look):
    def looked(path, *args, **more):
        here = str(path).startswith(place)  # of the test: it may be in memory itself
        if str(path).startswith(("/proc", "/dev/shm")) and not here:
            raise FileNotFoundError(2, "not on this system", str(path))
        return look(path, *args, **more)
    return looked

for name in ("read_text", "read_bytes", "stat", "lstat", "readlink", "iterdir", "open"):
    setattr(pathlib.Path, name, hidden(getattr(pathlib.Path, name)))

import ddpprobe
from ddpprobe.cli.main import main

for argv in (["anomalies", run], ["info", run], ["trace", run], ["verify", run], ["ls", run],
             ["report", run, "-o", out], ["compare", run, run]):
    code = main(argv)
    assert code == 0, (argv, code)
opened = ddpprobe.open(run)
assert len(list(opened.records())) == 6
assert opened.to_xarray().sizes["step"] == 6
print("read")
"""


def test_a_run_is_read_by_python_and_by_every_verb_where_linux_is_not(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", ranks=1)
    for step in range(6):
        made.write([record(0, step)])
    made.close()
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(made.path), str(tmp_path / "report.html")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout[-5:]) == (0, "read\n"), done.stdout + done.stderr
