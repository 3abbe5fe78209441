"""Several jobs of one run in an object store: each is an attempt of its own, on whatever disk."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import ddpprobe
from ddpprobe.daemon import launch, local_rank
from ddpprobe.errors import InstallError
from ddpprobe.rank import attempts
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import paths, store_url, tmpfs
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.remote import claims
from ddpprobe.store.remote.bucket import Bucket
from ddpprobe.store.remote.upload import Conflict, Waiting
from ddpprobe.store.writer import StoreWriter

from ...clouds import Cloud, sealed_run, serve, serving, upload, url_of
from ...made_runs import NODE, Made, key


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Cloud]:
    with serving(tmp_path_factory.mktemp("cloud")) as cloud:
        yield cloud


@pytest.fixture
def cloud(server: Cloud, tmp_path: Path, monkeypatch) -> Iterator[Cloud]:
    monkeypatch.chdir(tmp_path)
    # The jobs are this process, which lives on: how it ends need not be waited for.
    monkeypatch.setattr(local_rank, "PATIENCE_SECONDS", 0.2)
    with server.given(tmp_path, monkeypatch):
        yield server


@pytest.fixture
def url(request) -> str:
    return url_of(request)


def job(url: str, steps: int = 4, meanwhile: Callable[[RunDir], object] = lambda _: None) -> RunDir:
    """Train, alone and without a daemon; return the directory."""
    run = RunDir(Path("ddpprobe-runs").absolute() / url.rpartition("/")[2])
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ddpprobe.install(model, run_dir=url, every=1, daemon="none"):
        for _ in range(steps):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        meanwhile(run)
    return run


def records(place: Path | str, attempt: int) -> list[bytes]:
    return [key(r) for r in open_run(place).records(0, attempt)]


def test_a_job_that_starts_again_on_an_empty_disk_is_the_next_attempt_of_its_run(
    cloud, url, monkeypatch
):
    lost = []

    def perish(run: RunDir) -> None:
        StoreWriter(run, NODE, block=8, durable=False).fold()
        upload(run, url).bring()
        lost.extend(records(run.path, 0))
        shutil.rmtree(run.path)

    with monkeypatch.context() as patch:
        patch.setattr(tmpfs, "ROOT", Path("missing"))
        patch.setattr(
            "ddpprobe.rank.record_files.JournalWriter", partial(JournalWriter, segment_frames=10)
        )
        job(url, 60, perish)
    assert open_run(url).info()["state"] == "unknown"

    run = job(url)
    assert run.attempts() == [1]
    assert serve(run) == 0
    second = records(run.path, 1)
    shutil.rmtree(run.path)

    there = open_run(url)
    assert there.attempts() == [0, 1]
    first = records(url, 0)
    assert 8 <= len(first) < len(lost) == 60  # what was not committed yet is lost with its disk
    assert first == lost[: len(first)]
    assert records(url, 1) == second
    assert len(second) == 4
    report = verify(there)
    assert (report.ok, report.notes) == (True, [])
    info = there.info()
    assert (info["state"], info["destination"]) == ("ended", url)
    assert len({run_id_of(url, n) for n in range(2)}) == 1
    # Stock readers find all of it from the root, which hides nothing.
    root = json.loads((there.path / "run.zarr/zarr.json").read_text())
    assert root["attributes"]["ddpprobe"]["attempts"] == [0, 1]
    assert "consolidated_metadata" not in root
    assert job(url).attempts() == [2]


def run_id_of(url: str, attempt: int) -> str:
    path = open_run(url).path / f"run.zarr/attempt_{attempt:03d}/rank_00000/zarr.json"
    return json.loads(path.read_text())["attributes"]["ddpprobe"]["meta"]["run_id"]


def test_a_job_on_its_old_disk_goes_on_after_the_attempts_of_others(cloud, url, tmp_path):
    job(url)
    kept = tmp_path / "kept"
    Path("ddpprobe-runs").rename(kept)
    job(url)  # elsewhere
    shutil.rmtree("ddpprobe-runs")
    kept.rename("ddpprobe-runs")
    assert job(url).attempts() == [0, 2]


@pytest.mark.parametrize("plain", [False, True])
def test_jobs_that_come_at_once_are_attempts_of_one_run(cloud, url, plain):
    if plain:  # a store without conditional requests: one after the other, at least
        cloud.be(plain=True)
    made = sealed_identity(url)
    answers = {}

    def come(n: int) -> None:
        own = {**made, "run_id": f"job-{n}"}
        answers[n] = claims.claim_next(Bucket(url), own, 0, f"token-{n}", new=True)

    threads = [threading.Thread(target=come, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
        if plain:
            thread.join()
    for thread in threads:
        thread.join()
    assert {a["attempt"] for a in answers.values()} == {0, 1, 2, 3}
    assert len({a["run_json"]["run_id"] for a in answers.values()}) == 1
    n, answer = answers.popitem()
    assert claims.is_claimed(Bucket(url), answer["attempt"], f"token-{n}")


def sealed_identity(url: str) -> dict[str, object]:
    return {
        "format_version": 1, "run_id": "id", "name": "made", "world_size": 1, "nodes": 1,
        "created_ns": 1, "every": 1, "wrapper": "ddp", "torch": "2", "backend": "gloo",
        "hostname": "here", "destination": url,
    }  # fmt: skip


def test_jobs_that_live_at_once_leave_each_others_groups_in_the_root(cloud, url, tmp_path):
    made = [Made(tmp_path / str(n), ranks=1, attempt=n) for n in range(2)]
    for n, writing in enumerate(made):
        identity = {**sealed_identity(url), "run_id": "id"}
        paths.write_json(writing.run.run_json, identity)
        writing.whole(3 + n).close()
    writers = [StoreWriter(m.run, NODE, block=2, durable=False) for m in made]
    bringing = [upload(m.run, url) for m in made]
    for turn in ("fold", "seal"):  # the root changes with both
        for writer, bring in zip(writers, bringing, strict=True):
            getattr(writer, turn)()
            bring.bring()
            report = verify(open_run(url))
            assert (report.ok, report.notes) == (True, [])
    root = json.loads(Bucket(url).read("run.zarr/zarr.json", 1 << 20))
    assert root["attributes"]["ddpprobe"]["attempts"] == [0, 1]
    assert "consolidated_metadata" not in root
    for n, writing in enumerate(made):
        assert Bucket(url).read(f"run.zarr/attempt_{n:03d}/zarr.json", 1 << 20)
        assert records(url, n) == records(writing.run.path, n)


def test_a_job_that_could_not_ask_goes_beside_the_run_that_lies_there(
    cloud, url, monkeypatch, caplog
):
    another = json.dumps(sealed_identity(url)).encode()
    Bucket(url).write("run.json", another)
    monkeypatch.setattr(launch, "ASK_SECONDS", 0.5)
    cloud.be(silent=True)
    with caplog.at_level(logging.WARNING):
        run = job(url)
    cloud.be()
    beside = store_url.beside(url, str(json.loads(run.run_json.read_text())["run_id"]))
    (said,) = [r.getMessage() for r in caplog.records if "cannot be asked" in r.getMessage()]
    assert "no answer within" in said
    assert beside in said
    assert serve(run) == 0
    assert f"this run goes to {beside}" in caplog.text
    assert open_run(run.path).info()["destination"] == beside
    assert records(beside, 0) == records(run.path, 0)
    assert verify(open_run(beside)).ok
    assert [k for k, _, _ in Bucket(url).names("")] == ["run.json"]
    assert Bucket(url).read("run.json", 1 << 20) == another
    monkeypatch.setattr(launch, "ASK_SECONDS", 30.0)
    assert job(url).attempts() == [0, 1]  # the directory goes on where it went
    assert claims.is_claimed(Bucket(beside), 1, claims.token_of(run, 1))


def test_what_lies_there_and_cannot_be_continued_is_refused_before_training(cloud, url):
    for said, why in (
        (b'{"format_version": 99}', "written by a newer ddpprobe"),
        (b'{"format_version": 1, "run_id": 7}', "its run.json is damaged"),
        (b"[1", "its run.json is damaged"),
    ):
        Bucket(url).write("run.json", said)
        with pytest.raises(InstallError, match=f"cannot be continued: {why}.*Give run_dir="):
            job(url)
        assert not list(Path("ddpprobe-runs").rglob("run.json"))
    assert not list(Bucket(url).names("attempts"))


def test_an_attempt_that_is_another_jobs_is_never_overwritten(cloud, url, tmp_path):
    run = sealed_run(tmp_path / "run", url)
    paths.write_json(run.claim(0), {"claim": "mine"})
    Bucket(url).write("run.json", run.run_json.read_bytes())
    before = len(cloud.puts())
    with pytest.raises(Waiting):  # the head claims it, and nobody else
        upload(run, url, "node_0001").bring()
    assert claims.claim(Bucket(url), 0, "another's")
    for node in (NODE, "node_0001"):
        with pytest.raises(Conflict, match="attempt 0 there is another job's"):
            upload(run, url, node).bring()
    assert [p for p in cloud.puts()[before:] if "attempts" not in p] == []


def test_a_node_knows_whether_the_heads_directory_is_its_own(tmp_path):
    head, other = RunDir(tmp_path / "head"), RunDir(tmp_path / "other")
    identity = sealed_identity("s3://runs/x")
    paths.make_dir(head.path)
    paths.write_json(head.run_json, identity)
    paths.make_dir(head.attempt_dir(0))
    paths.write_json(head.claim(0), {"claim": "a"})
    attempts.arrive(head, "node_0001", identity, 0, "a")  # one directory for both
    assert paths.OWN_DISK not in json.loads(head.run_json.read_text())
    attempts.arrive(other, "node_0001", identity, 0, "a")
    assert json.loads(other.run_json.read_text())[paths.OWN_DISK] == "node_0001"
    assert claims.token_of(other, 0) == "a"
    # The job starts again, with the head on the other machine.
    attempts.arrive(head, "node_0001", identity, 1, "b")
    assert json.loads(head.run_json.read_text())[paths.OWN_DISK] == "node_0001"
    # A directory of quite another run stays what it is.
    attempts.arrive(head, "node_0001", {**identity, "run_id": "new"}, 2, "c")
    assert json.loads(head.run_json.read_text())["run_id"] == "id"


# ---- where several nodes write


def test_another_node_knows_the_heads_directory_by_its_mark(tmp_path):
    head, other = RunDir(paths.make_dir(tmp_path / "head")), RunDir(tmp_path / "other")
    before = attempts.mark_disk(head)
    assert attempts.is_shared(head, before)
    assert not attempts.is_shared(other, before)
    shutil.copytree(head.path, other.path)
    mark = attempts.mark_disk(head)  # the job starts again: the copy is of the last time
    assert attempts.is_shared(head, mark)
    assert not attempts.is_shared(other, mark)
    (other.path / attempts.DISK).write_text("[]")
    assert not attempts.is_shared(other, mark)


@pytest.mark.parametrize(
    ("own", "url", "moved", "level", "said"),
    [
        ([], None, False, None, ""),
        ([], None, True, "WARNING", "all nodes write to /run; a relative run_dir is taken from"),
        ([1], None, False, "WARNING", "node 1. Every node writes its own ranks to /run; when the"),
        ([1, 2], "s3://b/r", False, "INFO", "nodes 1, 2. Every node writes its own ranks to /run;"),
        (range(1, 20), None, True, "WARNING", "nodes 1, 2, 3, 4, 5, 6, 7, 8, ... (19). Every"),
    ],
)  # fmt: skip
def test_where_the_nodes_write_is_said_in_one_line(caplog, own, url, moved, level, said):
    caplog.set_level("INFO", "ddpprobe")
    identity = {"destination": url} if url else {}
    claimed = attempts.Claimed(RunDir(Path("/run")), identity, 0, "", paths.DirectoryLock(Path()))
    attempts.say_where(claimed, own, moved=moved)
    assert [r.levelname for r in caplog.records] == ([level] if level else [])
    assert said in caplog.text
    if own and not url:
        assert "ddpprobe collect DEST DIR..." in caplog.text
