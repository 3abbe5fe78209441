"""An object store of the tests' own, and runs that go there."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpprobe.daemon import __main__ as daemon
from ddpprobe.reader.run import Run
from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.remote.bucket import Bucket
from ddpprobe.store.remote.upload import Upload
from ddpprobe.store.writer import StoreWriter

from . import made_packs
from .made_runs import NODE, Made, key
from .waiting import PATIENCE

SECRET = "a-key-that-nobody-writes-down"
SITE = "layers.0.mlp.weight:param"
SERVER = Path(__file__).with_name("object_store_server.py")


@dataclass
class Cloud:
    """The server: what it is told, and what it took."""

    endpoint: str
    orders: Path

    def be(self, **said: float) -> None:
        made = self.orders.with_suffix(".new")
        made.write_text(json.dumps(said))
        made.replace(self.orders)

    def puts(self) -> list[str]:
        return self._lines(".puts")

    def gets(self) -> list[str]:
        """Return what was asked for while it was told to `watch`: requests under way, and path."""
        return self._lines(".gets")

    def put_raw(self, path: str, data: bytes) -> None:
        """Put an object under a name that no library would send."""
        request = urllib.request.Request(f"{self.endpoint}/runs/{path}", data, method="PUT")
        urllib.request.urlopen(request, timeout=10 * PATIENCE).close()

    @contextmanager
    def given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
        """Be the object store of everything that is started meanwhile."""
        for name, value in {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": SECRET, "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "DDPPROBE_LINGER": "0",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        for suffix in (".puts", ".gets"):
            self.orders.with_suffix(suffix).unlink(missing_ok=True)
        self.be()
        yield self
        self.be()

    def _lines(self, suffix: str) -> list[str]:
        log = self.orders.with_suffix(suffix)
        return log.read_text().splitlines() if log.exists() else []


@contextmanager
def serving(directory: Path) -> Iterator[Cloud]:
    orders = directory / "orders"
    orders.write_text("{}")
    with subprocess.Popen(
        [sys.executable, str(SERVER), str(orders)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = process.stdout.readline().strip()
            yield Cloud(f"http://127.0.0.1:{port}", orders)
        finally:
            process.kill()


def url_of(request: pytest.FixtureRequest) -> str:
    """Return a URL that no other test has."""
    return f"s3://runs/team/{request.node.name.replace('[', '-').rstrip(']')}"


def made_run(path: Path, url: str, steps: int = 40) -> RunDir:
    """Return an ended run with a destination; its journals wait for a daemon."""
    writing = Made(path, segment_frames=64)
    identity = json.loads(writing.run.run_json.read_text())
    paths.write_json(writing.run.run_json, {**identity, "destination": url})
    run = writing.whole(steps).close()
    for step in (3, 9):
        whole = made_packs.whole([64, 32], "float32", step)
        parts = made_packs.sharded(whole, [2], [0])
        made_packs.write(run, [(made_packs.KEY, parts)], step=step)
    return run


def sealed_run(path: Path, url: str) -> RunDir:
    """Return such a run after its daemon has ended."""
    shutil.copytree(_sealed(), path)
    run = RunDir(path)
    identity = json.loads(run.run_json.read_text())
    paths.write_json(run.run_json, {**identity, "destination": url})
    return run


@functools.cache
def sealed_at(endpoint: str) -> str:
    """Return the URL of such a run, brought once to a server: for those that only look at it."""
    url = "s3://runs/team/sealed"
    run = RunDir(_sealed())
    upload(run, url).bring()
    return url


@functools.cache
def _sealed() -> Path:
    path = Path(tempfile.mkdtemp(prefix="ddpprobe-sealed-"))
    atexit.register(shutil.rmtree, path)
    StoreWriter(made_run(path, "s3://runs/x"), NODE, durable=False).seal()
    return path


def serve(run: RunDir, wait: float = 0.2) -> int:
    return daemon.main(["--dir", str(run.path), "--linger", "0", "--wait", str(wait),
                        "--listen", "127.0.0.1:0"])  # fmt: skip


def what_it_says(run: Run) -> tuple[object, ...]:
    """Return all that a reader can ask of a made run."""
    records = [key(r) for rank in (None, *run.ranks()) for r in run.records(rank)]
    tensors = [run.tensor(SITE, c.step)[...].tobytes() for c in run.captures()]
    return records, run.anomalies(), tensors, [(r.node, r.time_ns) for r in run.readings()]


def upload(run: RunDir, url: str, node: str = NODE) -> Upload:
    return Upload(run, node, Bucket(url), lambda: None)
