"""JSON of a stranger with a right checksum: every decoder takes it, or refuses it in its own way.

An infinity, NaN, 10**400, other types, missing keys and deep nesting, at any place of any document.
`DDPPROBE_TEST_DRAWS` sets how often so many are drawn; there are 50,000.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpprobe.daemon import blocks, launch
from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.daemon.node import DaemonOptions, NodeDaemon
from ddpprobe.daemon.requests import RequestFiles
from ddpprobe.daemon.snapshot import Readings, view_of
from ddpprobe.daemon.uploader import destination_of, identity_of
from ddpprobe.detectors.suite import default_suite
from ddpprobe.errors import PackDamaged, RunError
from ddpprobe.metrics.render import render
from ddpprobe.reader.run import open_run
from ddpprobe.rundir import framing, paths, safe_read
from ddpprobe.rundir.journal_tail import RankTail
from ddpprobe.rundir.orders import Order, OrderReader, encode
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.tensor_pack import Pack
from ddpprobe.store.captures.event import event_from
from ddpprobe.store.manifest import Manifest
from ddpprobe.store.writer import StoreWriter

from ..faults import hostile_asked as asked
from ..faults import hostile_captures, hostile_cases, odd_json
from ..made_runs import ANOMALY, NODE, Made

DRAWS = int(os.environ.get("DDPPROBE_TEST_DRAWS", "0"))
QUIET = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
SECONDS = 20.0  # of CPU time for one document, which takes milliseconds; a hang takes more
AT_ONCE = 30  # documents of one draw


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return odd_json.make_all(tmp_path_factory.mktemp("model") / "run")


@pytest.fixture
def here() -> Iterator[Path]:
    """A directory of which every draw has one of its own inside."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


# ---- one decoder of each sort: what it takes, and what it may raise


def _of_a_rank(data: bytes, at: Path) -> None:
    (at / "00000000.wal").write_bytes(data)
    tail = RankTail(at, 0)
    tail.read(1000)
    tail.close()


def _of_a_daemon(data: bytes, at: Path) -> None:
    (at / "00000000.wal").write_bytes(data)
    DaemonJournal(at, {}, default_suite()).close()


def _pushed(data: bytes, at: Path) -> None:
    with contextlib.suppress(ValueError):
        blocks.decode(data)


def _event(data: bytes, at: Path) -> None:
    with contextlib.suppress(ValueError):
        event_from(safe_read.parse(data))


def _pack(data: bytes, at: Path) -> None:
    (at / "pack").write_bytes(hostile_captures._ended(0, data))
    with contextlib.suppress(PackDamaged):
        Pack.open(at / "pack")


def _manifest(data: bytes, at: Path) -> None:
    (at / "m.log").write_bytes(framing.encode_frame(framing.META, 0, data))
    Manifest(at / "m.log")


def _run_json(data: bytes, at: Path) -> None:
    run = RunDir(at)
    run.run_json.write_bytes(data)
    destination_of(identity_of(run))
    with contextlib.suppress(ValueError):
        paths.continued(data, at)
    with contextlib.suppress(RunError):
        open_run(at).info()


def _daemon_json(data: bytes, at: Path) -> None:
    path = RunDir(at).daemon_file(NODE, "json")
    path.parent.mkdir()
    path.write_bytes(data)
    assert launch.wait_for_daemon(RunDir(at), NODE, 0) is None


def _order(data: bytes, at: Path) -> None:
    (at / "orders").write_bytes(framing.encode_frame(framing.LIFE, 0, data))
    reader = OrderReader(at / "orders")
    reader.look()
    reader.close()


def _request(data: bytes, at: Path) -> None:
    (at / "one.json").write_bytes(data)
    RequestFiles(at).collect(0)


Decoder = Callable[[bytes, Path], None]


def documents(model: RunDir) -> Iterator[tuple[str, Any, Callable[[bytes], bytes], Decoder]]:
    """Yield (name, document, the bytes that it stands in, who reads them)."""
    for path in odd_json.journals(model):
        data, reads = path.read_bytes(), _of_a_rank if "rank" in path.parent.name else _of_a_daemon
        said = set[object]()
        for number, frame in enumerate(framing.iter_frames(data)):
            head, _ = odd_json.head_of(frame)
            sort = (frame.type, head.get("event") if isinstance(head, dict) else None)
            if sort in said:
                continue
            said.add(sort)

            def put(head: bytes, data=data, number=number, frame=frame) -> bytes:
                return odd_json.with_frame(data, number, odd_json.payload_of(frame, head))

            name = f"{path.parent.name}/{path.name} {sort}"
            yield name, head, put, reads
            yield f"pushed {name}", head, put, _pushed
    yield "event", odd_json.event_document(model), bytes, _event
    yield "pack", odd_json.pack_index(model), bytes, _pack
    for log in sorted((model.path / "manifest").glob("*.log")):
        frame = next(framing.iter_frames(log.read_bytes()))
        yield f"manifest {log.name}", frame.json(), bytes, _manifest
    yield "run.json", json.loads(model.run_json.read_bytes()), bytes, _run_json
    yield "daemon.json", odd_json.SERVES, bytes, _daemon_json
    order = Order(3, "capture", 7, 8, ("a",), "why", ANOMALY, "request/1")
    frame = next(framing.iter_frames(encode(order)))
    yield "order", frame.json(), bytes, _order
    yield "request", {"reason": "asked", "modules": ["a"], "steps": 4}, bytes, _request


class Known(list[tuple[str, Any, Callable[[bytes], bytes], Decoder]]):
    """All documents; hypothesis shows what a test is given, and this is long."""

    def __repr__(self) -> str:
        """Say how many there are."""
        return f"{len(self)} documents"


@pytest.fixture(scope="module")
def known(model: RunDir) -> Known:
    found = Known(documents(model))
    assert len({name for name, *_ in found}) == len(found) > 40
    return found


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=DRAWS or 60, deadline=None, suppress_health_check=QUIET)
def test_no_decoder_raises_what_its_readers_do_not_expect(
    known: Known, here: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for name, document, put, reads in rng.sample(known, AT_ONCE):
        place = rng.choice(list(odd_json.places(document)))
        odd = rng.choice(odd_json.ODD)
        directory = Path(tempfile.mkdtemp(dir=here))
        started = time.process_time()
        try:
            reads(put(odd_json.changed(document, place, odd)), directory)
        except Exception as error:
            error.add_note(f"{name}: {odd!r:.60} at {place}")
            raise
        assert time.process_time() - started < SECONDS, (name, place, odd)
        shutil.rmtree(directory)


# ---- and everything above the decoders: the verbs, a daemon, the fold

LINES = (
    "info RUN --json", "anomalies RUN", "trace RUN --site * --json", "verify RUN",
    "report RUN -o OUT/page.html", "export RUN --format csv -o OUT/x.csv",
    "export RUN --format openmetrics -o OUT/x.om", "compare RUN GOOD", "replay RUN",
    "top RUN --once",
)  # fmt: skip


def odd_run(run: RunDir, rng: random.Random) -> str:
    """Change one document of a run; return which, and how."""
    odd = rng.choice(odd_json.ODD)
    which = rng.choice(("journal", "journal", "event", "event", "pack", "run.json", "rows"))
    if which == "journal":
        path = rng.choice(odd_json.journals(run))
        data = path.read_bytes()
        frames = list(framing.iter_frames(data))
        sorts = sorted({frame.type for frame in frames})
        sort = rng.choice(sorts)
        number = rng.choice([i for i, frame in enumerate(frames) if frame.type == sort])
        head, _ = odd_json.head_of(frames[number])
        place = rng.choice(list(odd_json.places(head)))
        payload = odd_json.payload_of(frames[number], odd_json.changed(head, place, odd))
        path.write_bytes(odd_json.with_frame(data, number, payload))
        which = f"{path.parent.name}/{path.name} frame {number}"
    elif which == "event":
        document = odd_json.event_document(run)
        told = document["attributes"]["ddpprobe"] if rng.random() < 0.5 else document
        place = rng.choice(list(odd_json.places(told)))
        text = odd_json.changed(told, place, odd)
        if told is not document:
            whole = json.dumps({**document, "attributes": {"ddpprobe": "@here@"}})
            text = whole.replace('"@here@"', text.decode()).encode()
        hostile_captures._forge(run.path, hostile_captures.EVENT, text)
    elif which == "pack":
        index = odd_json.pack_index(run)
        place = rng.choice(list(odd_json.places(index)))
        path = run.path / hostile_captures.PACK
        data = path.read_bytes()
        offset = data.rindex(json.dumps(index, separators=(",", ":")).encode())
        text = odd_json.changed(index, place, odd)
        path.write_bytes(data[:offset] + hostile_captures._ended(offset, text))
    elif which == "run.json":
        identity = json.loads(run.run_json.read_bytes())
        place = rng.choice([p for p in odd_json.places(identity) if p != ("format_version",)])
        run.run_json.write_bytes(odd_json.changed(identity, place, odd))
    else:
        place, odd = ("a row",), None
        hostile_cases._odd_rows(run.path, run.path, rng)
    return f"{which}: {odd!r:.60} at {place}"


def asked_of_a_daemon(run: RunDir) -> None:
    """Let a daemon follow the run and show it, and fold it, as far as it can be."""
    daemon = NodeDaemon(DaemonOptions(run, NODE, "127.0.0.1:0", linger=0.0, wait=0.0))
    try:
        daemon._follow_attempts()
        attempt = daemon._attempt
        if attempt is not None:
            while attempt.poll(time.monotonic())[1]:
                pass
            view = view_of(
                attempt, Readings(), run_id=daemon._run_id(), finished=False,
                dropped=daemon._losses(), restarts={}, components={},
            )  # fmt: skip
            render(view, openmetrics=True)
            attempt.close(ended=False)
    finally:
        daemon._watcher.close()
        folder = StoreWriter(run, NODE, durable=False)
    folder.seal()
    folder.close()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=DRAWS or 6, deadline=None, suppress_health_check=QUIET)
def test_no_verb_and_no_daemon_raises_over_it(model: RunDir, here: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = Path(tempfile.mkdtemp(dir=here))
    run = RunDir(path / "run")
    shutil.copytree(model.path, run.path)
    what = odd_run(run, rng)
    for line in rng.sample(LINES, 2 if not DRAWS else 5):
        ((_, words),) = asked.verbs([line], run.path, model.path, path)
        code, found = asked.answer(line, words, path)
        assert found == [], (line, what)
        assert code in {0, 1, 2, 3, 4}, (line, what)
    asked_of_a_daemon(run)
    shutil.rmtree(path)


@pytest.mark.parametrize("key", ["hostname", "pid", "pid_start", "head", "world_size", "node"])
def test_a_daemon_goes_by_a_rank_that_does_not_say_who_it_is(
    model: RunDir, here: Path, key: str
) -> None:
    run = RunDir(here / "run")
    shutil.copytree(model.path, run.path)
    told = 0
    for path in odd_json.journals(run):
        data = path.read_bytes()
        for number, frame in enumerate(framing.iter_frames(data)):
            head, _ = odd_json.head_of(frame)
            if frame.type == framing.META and key in head:
                text = odd_json.changed(head, (key,), odd_json.GONE)
                payload = odd_json.payload_of(frame, text)
                path.write_bytes(odd_json.with_frame(data, number, payload))
                told += 1
    assert told > 1
    asked_of_a_daemon(run)


def test_a_verdict_of_no_sense_is_kept_as_damage_and_keeps_no_other_out(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1).whole(6)  # with one verdict
    said = json.loads(framing.encode_anomaly(replace(ANOMALY, step=5)))
    made.tell(framing.ANOMALY, replace(ANOMALY, step=4))
    for step in (float("inf"), 10**400):
        made.daemon.append(framing.ANOMALY, framing.encode_json({**said, "step": step}))
    made.tell(framing.ANOMALY, replace(ANOMALY, step=5))
    made.close()
    for _ in range(2):  # a second daemon finds it so, too
        folder = StoreWriter(made.run, NODE, durable=False)
        folder.seal()
        folder.close()
        run = open_run(tmp_path)
        assert sorted(a.step for a in run._merged_reader.daemon_anomalies(0)) == sorted(
            [ANOMALY.step, 4, 5]
        )
        assert [lost.why for lost in run.lost if "sense" in lost.why]
        assert list(made.run.daemon_journal(0, NODE).glob("*.wal"))
