"""A run in an object store: uploaded beside the training, whole at every instant, read by its URL.

Against moto's S3 in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xarray

import ddpprobe
from ddpprobe.cli import main
from ddpprobe.daemon import uploader
from ddpprobe.errors import RunError
from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing, paths, store_url
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.manifest import State, in_two_lines, version_of
from ddpprobe.store.remote import cache
from ddpprobe.store.remote.bucket import Bucket, BucketError
from ddpprobe.store.remote.upload import Conflict
from ddpprobe.store.retention import Retention, RetentionLimits
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

from ... import made_packs
from ...clouds import (
    SECRET,
    SITE,
    Cloud,
    made_run,
    sealed_at,
    sealed_run,
    serve,
    serving,
    upload,
    url_of,
    what_it_says,
)
from ...made_runs import NODE, Made, key, record, tree
from ...pages import blocks, ddpprobe_words
from ...waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Cloud]:
    with serving(tmp_path_factory.mktemp("cloud")) as cloud:
        yield cloud


@pytest.fixture
def cloud(server: Cloud, tmp_path: Path, monkeypatch) -> Iterator[Cloud]:
    with server.given(tmp_path, monkeypatch):
        yield server


@pytest.fixture
def url(request) -> str:
    return url_of(request)


TRAIN = """
import importlib.util, os, sys, torch, ddpprobe
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
opt = torch.optim.SGD(model.parameters(), 0.01)
probe = ddpprobe.install(model, every=1, capture="1")
for step in range(4):
    loss = model(torch.randn(4, 8)).sum()
    if step == 2 and dist.get_rank() == 1:
        loss = loss * float("nan")
    opt.zero_grad(); loss.backward(); opt.step()
assert importlib.util.find_spec("obstore") and "obstore" not in sys.modules
probe.close()
dist.destroy_process_group()
"""


def test_a_job_uploads_itself_and_is_read_like_its_directory_when_that_is_gone(
    cloud, url, torchrun, tmp_path, poll, capsys
):
    done = torchrun(TRAIN, env={"DDPPROBE_DIR": url})
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "ddpprobe-runs" / url.rpartition("/")[2])
    log = run.daemon_file(NODE, "log")
    poll(lambda: f"the run is at {url}" in log.read_text(), timeout=60)
    poll(lambda: not paths.is_locked(run.daemon_file(NODE, "lock")))
    assert not any(SECRET.encode() in data for data in tree(tmp_path).values())
    here = open_run(run.path)

    def told(run: Run) -> tuple[object, ...]:
        series = run.series("*", "rms")
        tensors = [run.tensor("1:output", c.step)[...].tobytes() for c in run.captures()]
        records = [key(r) for rank in (None, 0, 1) for r in run.records(rank)]
        return records, run.anomalies(), series.values.tobytes(), tensors, run.info()["attempts"]

    expected = told(here)
    assert [(a.step, a.rank) for a in expected[1] if a.first_cause] == [(2, 1)]
    shutil.rmtree(run.path)
    there = ddpprobe.open(url)
    assert told(there) == expected
    assert (there.info()["path"], there.info()["state"]) == (url, "ended")
    report = verify(there)
    assert (report.ok, report.notes) == (True, [])
    assert main.main(["anomalies", url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["anomalies"][0]["step"] == 2
    stock_readers_open(url)


def stock_readers_open(url: str) -> None:
    """Zarr and xarray, with the store that they bring for it."""
    import obstore.store
    import zarr
    from zarr.storage import ObjectStore

    inner = obstore.store.from_url(f"{url}/run.zarr", client_options={"allow_http": True})
    store = ObjectStore(inner, read_only=True)
    assert zarr.open_group(store, mode="r").attrs["ddpprobe"]["destination"] == url
    opened = xarray.open_zarr(store, group="attempt_000/merged")
    assert opened["step"].values.tolist() == list(range(4))
    assert np.isfinite(opened["values"].values[0]).any()
    assert xarray.open_datatree(store, engine="zarr")["attempt_000/rank_00001"].sizes["step"] == 4


def test_a_daemon_killed_while_it_uploads_leaves_a_whole_store_and_its_successor_goes_on(
    cloud, url, tmp_path, poll
):
    run = made_run(tmp_path / "run", url)
    cloud.be(hold=60)
    first = subprocess.Popen(
        [sys.executable, "-P", "-m", "ddpprobe.daemon", "--dir", str(run.path), "--wait", "1"]
    )
    poll(lambda: len(cloud.puts()) == 60, timeout=60)
    first.send_signal(signal.SIGKILL)
    first.wait()
    cloud.be()
    before = cloud.puts()
    assert "manifest/attempt_000.merged.log" not in "".join(before)
    assert verify(open_run(url)).ok
    assert serve(run) == 0
    there, here = open_run(url), open_run(run.path)
    assert what_it_says(there) == what_it_says(here)
    assert len(there.captures()) == 2
    assert verify(there).ok
    # What was there already was not brought again, but what the killed one had in its hands.
    blocks = [p for p in before if "/c/" in p]
    again = [p for p in cloud.puts()[len(before) :] if p in blocks]
    assert len(blocks) > 20
    assert len(again) < len(blocks)


def test_after_every_object_that_arrives_a_reader_finds_the_store_whole(cloud, url, tmp_path):
    writing = Made(tmp_path / "run", segment_frames=8)
    run, store = writing.run, StoreWriter(writing.run, NODE, block=8, durable=False)
    read = set()
    bringing = upload(run, url)
    for steps in (range(40), range(40, 70)):
        for step in steps:
            writing.write([record(r, step) for r in range(2)])
        assert store.fold() > 0
        arrived = len(cloud.puts())
        for stop in range(40):
            arrived += 31
            cloud.be(puts=arrived)
            try:
                bringing.bring()
            except BucketError:
                there = open_run(url)
                report = verify(there)
                assert report.ok, report.damage
                gaps = " ".join(there.completeness().unknown())
                assert (f"has arrived at {url}" in gaps) == (len(there.ranks()) < 2)
                assert "gone" not in gaps
                read.add(tuple(len(list(there.records(r))) for r in there.ranks()))
                if stop % 5 == 3:  # the next one is a daemon that knows nothing
                    bringing = upload(run, url)
            else:
                break
    assert not bringing.missing
    assert len(read) > 3
    there = open_run(url)
    for rank in (0, 1):
        whole = [key(r) for r in open_run(run.path).records(rank)]
        seen = [key(r) for r in there.records(rank)]
        assert seen == whole[: len(seen)]
        assert len(seen) >= 24  # what only the journal has is not over there
    writing.close()


def test_a_store_that_refuses_for_ever_ends_nothing_and_says_how_to_finish(
    cloud, url, tmp_path, monkeypatch, caplog, capsys
):
    run = made_run(tmp_path / "run", url)
    cloud.be(status=403)
    with monkeypatch.context() as hasty, caplog.at_level(logging.INFO):
        hasty.setattr(uploader, "GIVE_UP_SECONDS", 0.5)
        hasty.setattr(uploader, "LAST_TRY_SECONDS", 0.2)
        assert serve(run) == 0  # nobody who waits for ever comes back at all
    warnings = [r.message for r in caplog.records if "upload" in r.message]
    assert len([w for w in warnings if "cannot upload" in w]) == 1  # once, not once a try
    assert f"ddpprobe daemon --dir {run.path}" in warnings[-1]
    assert "403" in warnings[-1]
    assert SECRET not in caplog.text
    assert len(list(open_run(run.path).records())) == 40  # all of it is here
    finish = f"ddpprobe daemon --dir {run.path}"
    (said,) = open_run(run.path).info()["uploads"]
    assert said["finish"] == finish
    assert main.main(["info", str(run.path)]) == 0
    assert f"finish with: {finish}" in capsys.readouterr().out
    cloud.be()
    assert serve(run) == 0
    assert open_run(run.path).info()["uploads"] == []
    assert what_it_says(open_run(url)) == what_it_says(open_run(run.path))


def test_what_the_page_about_object_stores_tells_to_type_works(
    cloud, url, tmp_path, monkeypatch, capfd
):
    """A killed daemon's upload is finished by hand; then every reader has the run by its URL."""
    found = blocks("docs/how-to/object-stores")
    typed = [words for b in found if b.kind == "console" for words, _ in b.commands]
    read, finish = [words for line in typed for words in ddpprobe_words(line)]
    theirs = read[-1]
    sealed_run(tmp_path / finish[-1], url)
    monkeypatch.chdir(tmp_path)
    assert main.main([*read[:-1], url]) == 2  # nothing lies there yet
    assert "no run lies there" in capfd.readouterr().err
    assert main.main([*finish, "--wait", "0", "--listen", "127.0.0.1:0"]) == 0
    assert main.main([*read[:-1], url]) == 1
    assert "judged: 40 sampled steps" in capfd.readouterr().out
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    (stock,) = [b.text for b in found if b.kind == "python" and "open_zarr" in b.text]
    before, _, last = stock.rstrip().rpartition("\n")
    names: dict[str, object] = {}
    exec(before.replace(theirs, url) + f"\nseen = {last}", names)
    assert names["seen"].sizes["step"] == 40


def test_a_store_that_is_down_for_a_while_is_tried_again_until_all_is_there(
    cloud, url, tmp_path, caplog
):
    run = made_run(tmp_path / "run", url)
    cloud.be(status=503)

    def come_back() -> None:
        while "cannot upload" not in caplog.text:
            time.sleep(0.02)
        cloud.be()

    coming = threading.Thread(target=come_back, daemon=True)
    coming.start()
    with caplog.at_level(logging.INFO):
        assert serve(run, wait=1) == 0
    coming.join()
    assert f"{url} answers again" in caplog.text
    assert f"the run is at {url}" in caplog.text
    assert verify(open_run(url)).ok


HASTY = """
import sys
from ddpprobe.store.remote import bucket
from ddpprobe.daemon import __main__, uploader

bucket.REQUEST_SECONDS = bucket.RETRY_SECONDS = float(sys.argv.pop(1))
uploader.GIVE_UP_SECONDS, uploader.LAST_TRY_SECONDS = 1, 0.2
sys.exit(__main__.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def asking_in_vain(run: RunDir, request_seconds: float, poll) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon until it has waited for its object store, and says so on its page."""
    words = ["--dir", str(run.path), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([sys.executable, "-P", "-c", HASTY, str(request_seconds), *words])
    try:
        said = run.daemon_file(NODE, "json")
        poll(lambda: is_of(process.pid, said), timeout=30)
        page = f"http://{json.loads(said.read_text())['listen']}/metrics"
        poll(lambda: lag_by(page) > 0.1, timeout=30)
        yield process
    finally:
        process.kill()
        process.wait()


def is_of(pid: int, said: Path) -> bool:
    try:
        return bool(json.loads(said.read_text())["pid"] == pid)
    except FileNotFoundError:  # one that was killed has left its own, which the next one removes
        return False


def lag_by(page: str) -> float:
    """Return what a live daemon says of its upload; 0 before it begins."""
    try:
        with urllib.request.urlopen(page, timeout=10 * PATIENCE) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError:  # 503: nothing is known yet
        text = ""
    found = re.search(r"^ddpprobe_upload_lag_seconds (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_store_that_never_answers_delays_neither_the_metrics_nor_the_end(
    cloud, url, tmp_path, poll, capsys
):
    writing = Made(tmp_path / "run", pid=os.getpid(), segment_frames=8)
    identity = json.loads(writing.run.run_json.read_text())
    paths.write_json(writing.run.run_json, {**identity, "destination": url})
    run = writing.whole(40, told=False).run
    cloud.be(silent=True)
    with asking_in_vain(run, 3600.0, poll):  # a page that waited for a request would never come
        pass
    with asking_in_vain(run, 1.0, poll) as process:
        process.send_signal(signal.SIGTERM)  # in the middle of a request
        # Until it gives up, a last try, and the request that was under way with its two retries.
        assert process.wait(timeout=15 * PATIENCE) == 0
    writing.close()
    assert main.main(["info", str(run.path)]) == 0
    assert f"finish with: ddpprobe daemon --dir {run.path}" in capsys.readouterr().out
    assert cloud.puts() == []


def test_it_tells_how_far_behind_it_is_until_all_is_there(cloud, url, tmp_path, poll):
    run = made_run(tmp_path / "run", url)
    writer = StoreWriter(run, NODE, block=8, durable=False)
    writer.fold()
    writer.close()
    cloud.be(status=503)
    uploading = uploader.Uploader(run, NODE, url)
    try:
        poll(lambda: uploading.failures > 0, timeout=30)
        behind = uploading.lag_seconds()
        assert behind > 0
        poll(lambda: uploading.lag_seconds() > behind + 0.05)
        cloud.be()
        poll(lambda: uploading.lag_seconds() == 0, timeout=30)
    finally:
        uploading.close()


def test_another_run_at_the_same_url_is_left_alone(cloud, tmp_path):
    url = sealed_at(cloud.endpoint)
    second = made_run(tmp_path / "second", url)
    identity = json.loads(second.run_json.read_text())
    paths.write_json(second.run_json, {**identity, "run_id": "other"})
    before = len(cloud.puts())
    with pytest.raises(Conflict, match="another run lies there"):
        upload(second, url).bring()
    assert len(cloud.puts()) == before


def test_what_retention_takes_here_is_taken_there_and_said(cloud, url, tmp_path):
    run = made_run(tmp_path / "run", url)
    StoreWriter(run, NODE, block=8, durable=False).seal()
    bringing = upload(run, url)
    bringing.bring()
    keeper = Retention(
        run, Root(run, durable=False), RetentionLimits(max_bytes=60_000), durable=False
    )
    assert keeper.apply({0: {"rank_00000", "rank_00001", "merged"}}) > 3
    bringing.bring()
    there, here = open_run(url), open_run(run.path)
    assert [e.where for e in there.expired()] == [e.where for e in here.expired()] != []
    assert what_it_says(there) == what_it_says(here)
    assert verify(there).ok
    bucket, files = Bucket(url), set(tree(run.store))
    objects = {k.removeprefix("run.zarr/") for k, _, _ in bucket.names("run.zarr")}
    assert objects == files


def test_nodes_that_share_no_directory_fill_one_store(cloud, url, tmp_path):
    nodes = []
    for node in range(2):
        writing = Made(tmp_path / str(node))
        identity = json.loads(writing.run.run_json.read_text())
        own = {paths.OWN_DISK: "node_0001"} if node else {}
        paths.write_json(writing.run.run_json, {**identity, "nodes": 2, "destination": url, **own})
        writing.close()
        nodes.append(writing)
    head, other = (n.run for n in nodes)
    whole = made_packs.whole([64, 32], "float32", 3)
    parts = [(made_packs.KEY, made_packs.sharded(whole, [2], [0]))]
    for node, writing in enumerate(nodes):
        name = paths.node_name(node)
        meta = {**writing._meta(node), "node": name, "node_index": node, "head": node == 0}
        path = writing.run.rank_journal(0, name, node)
        journal = JournalWriter(path, meta)
        for step in range(12):
            journal.append_record(record(node, step))
        journal.append_json(framing.LIFE, {"event": "closed", "status": "ok"})
        journal.close()
        made_packs.write(
            writing.run, parts, step=3, only=lambda rank, node=node: rank == node, per_node=1
        )
        StoreWriter(writing.run, name, durable=False, captures=node == 0).seal()
    with pytest.raises(Exception, match="has not been there yet"):
        upload(other, url, "node_0001").bring()
    upload(head, url).bring()
    missing = " ".join(open_run(url).completeness().unknown())
    assert f"rank 1 of 2: nothing of theirs has arrived at {url}: " in missing
    assert "how to finish the upload (rank 0 ran on here)" in missing
    upload(other, url, "node_0001").bring()
    there = open_run(url)
    assert there.ranks() == [0, 1]
    assert [key(r) for r in there.records(1)] == [key(r) for r in open_run(other.path).records(1)]
    assert there.tensor(SITE, 3)[...].tobytes() == whole.tobytes()
    assert verify(there).ok
    assert paths.OWN_DISK not in there._identity


def test_a_first_fetch_asks_side_by_side_and_for_what_speaks_of_others_first(cloud, url, tmp_path):
    run = sealed_run(tmp_path / "run", url)
    upload(run, url).bring()
    cloud.be(seconds=0.02, watch=True)
    there = open_run(url)
    cloud.be()
    assert what_it_says(there) == what_it_says(open_run(run.path))
    asked = [line.split() for line in cloud.gets()]
    assert max(int(under_way) for under_way, _ in asked) > 4  # more than one group's
    logs = [Path(path).name for _, path in asked if path.endswith(".log")]
    first = {name: logs.index(f"attempt_000.{name}.log") for name in (
        "anomalies", "node_0000", "merged", "rank_00000", "rank_00001", "captures",
        "captures.step_0000000003", "captures.step_0000000003.node_0000",
    )}  # fmt: skip
    turns = [{"anomalies"}, {"node_0000"}, {"merged", "rank_00000", "rank_00001"}, {"captures"},
             {"captures.step_0000000003"}, {"captures.step_0000000003.node_0000"}]  # fmt: skip
    for before, after in pairwise(turns):
        assert max(first[n] for n in before) < min(first[n] for n in after)


# ---- a stranger's store


def test_names_and_sizes_of_a_strangers_store_lead_nowhere_and_are_listed(
    cloud, url, tmp_path, capsys
):
    run = sealed_run(tmp_path / "run", url)
    upload(run, url).bring()
    base = url.removeprefix("s3://runs/")
    evil = b"#!/bin/sh"
    claims = {"../../../evil": version_of(evil), "/tmp/evil": (9, 1), "a/" * 600 + "b": (9, 1),
              "zarr.json": (1 << 45, 7), "step/c/0": (1 << 60, 1), "step": (9, 9)}  # fmt: skip
    log = in_two_lines(State(), State(files=claims))
    bucket = Bucket(url)
    bucket.write("manifest/attempt_000.rank_00001.log", log)
    outside = {p for p in tmp_path.rglob("*") if "cache" not in p.parts}
    assert main.main(["verify", url]) == 3
    lost = capsys.readouterr().err
    assert "attempt_000/rank_00001" in lost
    assert {p for p in tmp_path.rglob("*") if "cache" not in p.parts} == outside
    copy = open_run(url).path
    assert copy.parent == cache.cache_home()
    assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    assert not [p for p in (tmp_path / "cache").rglob("*") if "evil" in p.name or p.is_symlink()]
    assert len(list(open_run(url).records(0))) == 40  # the rest is read
    for name in ("manifest/attempt_000.evil%20x.log", "manifest/x/evil.log"):
        cloud.put_raw(f"{base}/{name}", evil)
    assert len(list(open_run(url).records(0))) == 40
    cloud.put_raw(f"{base}/manifest/%2e%2e/%2e%2e/evil.log", evil)  # no library takes such a list
    assert main.main(["info", url]) == 2
    said = capsys.readouterr().err
    assert f"'{base}/manifest/../../evil.log'" in said  # which object it is, and what to do
    assert "delete it" in said
    assert not list(tmp_path.rglob("*evil*"))


def test_a_damaged_object_and_a_missing_one_are_lost_and_come_back_when_they_do(
    cloud, url, tmp_path
):
    run = sealed_run(tmp_path / "run", url)
    upload(run, url).bring()
    bucket = Bucket(url)
    name = "run.zarr/attempt_000/rank_00000/counts/c/0/0/0"
    bucket.write(name, b"x" * 5000)
    bucket.delete(["run.zarr/attempt_000/rank_00001/values/c/0/0/0"])
    report = verify(open_run(url))
    assert {lost.where.rpartition("/counts")[0] or lost.where for lost in report.damage} >= {
        "run.zarr/attempt_000/rank_00000"
    }
    assert any("rank_00001/values" in lost.where for lost in report.damage)
    for file in (name, "run.zarr/attempt_000/rank_00001/values/c/0/0/0"):
        bucket.write(file, (run.path / file).read_bytes())
    assert verify(open_run(url)).ok


def test_captured_arrays_are_fetched_when_they_are_asked_for(cloud):
    there = open_run(sealed_at(cloud.endpoint))

    def chunks() -> set[str]:
        top = there.path / "run.zarr/attempt_000/captures"
        return {p.relative_to(top).parts[0] for p in top.rglob("*") if "c" in p.parts[:-1]}

    assert [c.step for c in there.captures()] == [3, 9]
    assert chunks() == set()
    assert there.tensor(SITE, 9).shape == (64, 32)
    assert chunks() == {"step_0000000009"}


def test_a_run_over_there_is_a_lazy_dataset_too(cloud):
    there = open_run(sealed_at(cloud.endpoint))
    lazy = there.to_xarray(chunks={})
    assert lazy.rms.chunks is not None
    xarray.testing.assert_identical(lazy.compute(), there.to_xarray())


# ---- what is refused, and when


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("s3://me:" + SECRET + "@runs/x", "credentials come from the environment"),
        ("s3://runs/x?sig=" + SECRET, "credentials come from the environment"),
        ("s3://runs", "s3://BUCKET/PREFIX/RUN"),
        ("s3://runs/a/../b", "each part of letters"),
        ("https://runs/x", "https:// is no object store"),
        (Path("s3://runs/x"), 'run_dir="s3://..."'),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_before_training(tmp_path, monkeypatch, given, says):
    import torch

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="install|run_dir|write") as caught:
        ddpprobe.install(torch.nn.Linear(2, 2), run_dir=given)
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_the_library_install_and_the_reader_say_what_to_type(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        store_url.importlib.util, "find_spec", lambda n: None if n == "obstore" else real(n)
    )
    with pytest.raises(ValueError, match=r"pip install 'ddpprobe\[cloud\]'"):
        ddpprobe.install(torch.nn.Linear(2, 2), run_dir="s3://runs/x")
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in (
        "ddpprobe.store.remote.bucket",
        "ddpprobe.store.remote.download",
        "ddpprobe.store.remote.upload",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("ddpprobe.store.remote.download", raising=False)
    with pytest.raises(RunError, match=r"pip install 'ddpprobe\[cloud\]'"):
        open_run("s3://runs/x")


@pytest.mark.parametrize("verb", ["top", "trigger"])
def test_verbs_that_need_the_daemon_say_so(verb, capsys):
    assert main.main([verb, "s3://runs/x"]) == 2
    assert "where the run's daemon is" in capsys.readouterr().err


def test_a_url_with_no_run_and_a_store_that_does_not_answer_are_wrong_use(
    cloud, url, monkeypatch, capsys
):
    assert main.main(["info", url]) == 2
    assert "no run lies there" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main.main(["info", url]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_daemon_gets_the_variables_of_its_object_store_and_no_others(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "g")
    monkeypatch.setenv("WANDB_API_KEY", "w")
    assert "AWS_SECRET_ACCESS_KEY" in store_url.environment("s3://runs/x")
    assert (
        not {"GOOGLE_SERVICE_ACCOUNT", "WANDB_API_KEY"} & store_url.environment("s3://r/x").keys()
    )
