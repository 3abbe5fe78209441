"""The daemon over real processes: nothing acknowledged is lost, the first death is named."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ddpprobe.cli import main as cli
from ddpprobe.daemon import folding
from ddpprobe.daemon.__main__ import AFTER_PAUSE_SECONDS, main
from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.daemon.liveness import Exit
from ddpprobe.daemon.local_rank import LEAVING_SECONDS, PATIENCE_SECONDS, LocalRank
from ddpprobe.daemon.node import DaemonOptions, NodeDaemon, linger_of
from ddpprobe.detectors.suite import default_suite
from ddpprobe.ends.anomalies import retells
from ddpprobe.ends.end import STATES, End
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.records.events import ClosedEvent
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.heartbeat import Heartbeat
from ddpprobe.rundir.journal import JournalTail, JournalWriter
from ddpprobe.rundir.journal_tail import RankTail
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.targets import RECENT_SECONDS
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.writer import StoreWriter

from ..conftest import TAKEN, handlers_kept
from ..distributed import daemon_harness
from ..made_runs import ANOMALY, NODE, Made
from ..made_runs import record as made_record
from ..waiting import PATIENCE

wait, kill = daemon_harness.wait, daemon_harness.kill
MERGED = "attempt_000/merged"
OWN = {"type": "ValueError", "message": "bad batch", "where": "train.py:4 in main"}
GONE = {"type": "RuntimeError", "message": "Connection closed by peer", "collective": True}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[daemon_harness.Harness]:
    with daemon_harness.harness(tmp_path) as made:
        yield made


def overview(job: daemon_harness.Harness) -> list[dict[str, Any]]:
    """Return the rows of the small table that the daemon left."""
    return pq.read_table(job.run.path / "overview.parquet").to_pylist()


def test_two_ranks_are_merged_exactly_and_the_run_is_sealed(job) -> None:
    daemon = job.daemon()
    ranks = [job.rank(n) for n in range(2)]
    assert [r.wait(30 * PATIENCE) for r in ranks] == [0, 0]
    assert daemon.wait(30 * PATIENCE) == 0
    assert job.merged_steps() == job.acked(0) == list(range(40))
    group = daemon_harness.StoredGroup(job.run, "attempt_000/merged")
    for record in group.records(0):
        assert (record.ranks, record.missing) == ((0, 1), ())
        assert record.counts[:, 0].tolist() == [201, 201]
        assert record.values[0].tolist() == [-2.0, record.step, 2 * record.step + 1, 8.0]
        assert set(record.scalars) == {0, 1}
    assert (job.life("death"), len(job.life("finished"))) == ([], 1)
    assert not job.run.daemon_file("node_0000", "json").exists()
    (said,) = {(r["state"], r["sampled_steps"]) for r in overview(job)}
    assert said == ("ended", 40)


def test_a_nan_is_named_while_the_ranks_still_run(job) -> None:
    job.daemon()
    for n in range(2):
        job.rank(n, steps=15, bad=5 if n == 1 else None, hang=True)
    wait(lambda: 'ddpprobe_anomalies_total{detector="nonfinite",level="page"} 1.0' in job.metrics())
    text = job.metrics()
    assert 'ddpprobe_nonfinite_elements_total{kind="grad_output",rank="1"} 3.0' in text
    assert 'ddpprobe_nonfinite_elements_total{kind="grad_output",rank="0"} 0.0' in text
    assert 'ddpprobe_rank_anomalies_total{level="page",rank="1"} 1.0' in text
    assert 'ddpprobe_rank_up{rank="0"} 1.0' in text
    # Each sampled record says what the rank sees and how it scales, not only a change of it.
    assert 'ddpprobe_sites_expected{rank="0"} 3.0' in text
    assert 'ddpprobe_sites_observed{rank="1"} 2.0' in text
    assert 'ddpprobe_loss_scale{rank="1"} 1024.0' in text
    wait(lambda: "ddpprobe_first_cause_info{" in job.metrics())
    place = 'fqn="blocks.1",kind="grad_output",phase="backward",rank="1",step="5"'
    assert f'first_cause_info{{detector="nonfinite",{place}}} 1.0' in job.metrics()
    found = [p for t, p in job.frames() if t == framing.ANOMALY]
    assert [(a.step, a.rank, a.module, a.phase) for a in found] == [(5, 1, "blocks.1", "backward")]


def test_the_first_dead_rank_is_named_with_its_signal_and_nothing_of_it_is_lost(job) -> None:
    daemon = job.daemon(0, linger=600.0)
    first, second = (job.rank(n, steps=100, hang=True) for n in range(2))
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 2)  # it watches them
    wait(lambda: len(job.acked(0)) > 20)
    kill(first)
    wait(lambda: "ddpprobe_first_failure_timestamp_seconds" in job.metrics())
    assert 'first_failure_timestamp_seconds{rank="0",signal="SIGKILL"}' in job.metrics()
    wait(lambda: len(job.acked(1)) == 100)
    second.terminate()
    wait(lambda: job.life("finished"))
    daemon.terminate()
    assert daemon.wait(20 * PATIENCE) == 0
    assert [(d["rank"], d["signal"]) for d in job.life("death")] == [(0, "SIGKILL"), (1, "SIGTERM")]
    assert [(e["state"], e["ranks"]) for e in job.life("end")][-1] == ("crashed", [0])
    assert [(c["detector"], c["rank"]) for c in job.life("first_cause")] == [("rank_lost", 0)]
    assert job.merged_steps() == list(range(100))
    last = job.acked(0)[-1]
    group = daemon_harness.StoredGroup(job.run, "attempt_000/merged")
    for record in group.records(0):
        # The step under way when it died may be in its journal without having been printed.
        if record.step != last + 1:
            alone = record.step > last
            assert (record.ranks, record.missing) == (((1,), (0,)) if alone else ((0, 1), ()))


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ({}, []),
        ({"signal": signal.SIGABRT}, []),  # torch's threads, after a training that came to its end
        ({"exit": 3}, ["exit:3"]),
        ({"status": "exception", "exit": 1}, ["exit:1"]),
        ({"status": "exception", "signal": signal.SIGABRT}, ["SIGABRT"]),
        ({"status": "exception", "error": OWN, "signal": signal.SIGTERM}, ["ValueError"]),
    ],
)
def test_the_exit_of_a_rank_that_said_goodbye_tells_whether_it_failed(job, end, how) -> None:
    daemon = job.daemon()
    gate = job.run.path / "gate"
    job.rank(0, world=1, steps=10, go_on=str(gate), teardown=0.5, **end)
    wait(lambda: "ddpprobe_rank_up{" in job.metrics())  # else there is no exit to see
    gate.touch()
    assert daemon.wait(30 * PATIENCE) == 0
    assert [d["signal"] for d in job.life("death")] == how
    assert list((job.run.path / "journal").rglob("rank_*/*.wal")) == []


def test_prometheus_is_told_where_a_daemon_serves_until_it_ends(job, tmp_path, monkeypatch) -> None:
    directory = tmp_path / "targets"
    monkeypatch.setenv("DDPPROBE_SD_DIR", str(directory))
    daemon, gate = job.daemon(), job.run.path / "gate"
    wait(job.said)
    assert not directory.exists()  # there is nothing to watch yet
    ranks = [job.rank(n, steps=5, go_on=str(gate)) for n in range(2)]
    (path,) = wait(lambda: list(directory.rglob("*.json")))
    (group,) = json.loads(path.read_bytes())
    labels = {"run": "test-run", "__param_run": "test-run"}
    assert group == {"targets": [job.said()["listen"]], "labels": labels}
    with urllib.request.urlopen(f"http://{job.said()['listen']}/sd") as answer:
        assert json.loads(answer.read()) == [group]
    wait(lambda: f'directory="{job.run.path}"' in job.metrics())
    gate.touch()
    assert [r.wait(30 * PATIENCE) for r in ranks] == [0, 0]
    assert daemon.wait(30 * PATIENCE) == 0
    assert not list(directory.rglob("*.json"))
    # Who comes when all is over is not to be scraped: it would tell of it anew.
    before = directory.stat().st_mtime_ns, (path.parent).stat().st_mtime_ns
    assert job.daemon(linger=0.0).wait(30 * PATIENCE) == 0
    assert before == (directory.stat().st_mtime_ns, (path.parent).stat().st_mtime_ns)
    # What a killed one left would be scraped in vain, and TargetDown would fire after the job.
    path.write_text(json.dumps([group]))
    os.utime(path, (0, time.time() - RECENT_SECONDS - 1))
    assert job.daemon(linger=600.0).wait(30 * PATIENCE) == 0
    assert not path.exists()


@pytest.mark.parametrize(("exit_code", "state"), [(0, "ended"), (3, "crashed")])
def test_who_succeeds_a_daemon_killed_just_now_tells_prometheus_the_end(
    job, tmp_path, monkeypatch, exit_code, state
) -> None:
    """The daemon is killed first, then its ranks end, then another one comes."""
    directory = tmp_path / "targets"
    monkeypatch.setenv("DDPPROBE_SD_DIR", str(directory))
    daemon, gate = job.daemon(), job.run.path / "gate"
    status = {"status": "exception"} if exit_code else {}
    rank = job.rank(0, world=1, steps=5, go_on=str(gate), exit=exit_code, **status)
    (path,) = wait(lambda: list(directory.rglob("*.json")))
    kill(daemon)
    gate.touch()
    assert rank.wait(30 * PATIENCE) == exit_code
    before = path.read_bytes()
    successor = job.daemon(linger=600.0)
    wait(lambda: path.read_bytes() != before)
    assert json.loads(path.read_bytes())[0]["targets"] == [job.said()["listen"]]
    wait(lambda: f'ddpprobe_job_state{{state="{state}"}} 1.0' in job.metrics())
    successor.terminate()
    assert successor.wait(30 * PATIENCE) == 0
    assert not path.exists()


@pytest.mark.parametrize("word", ["stopped", "crashed", "hung", "vanished"])
def test_how_a_run_ended_is_the_same_word_wherever_it_is_told(job, call, word) -> None:
    daemon = job.daemon(0, linger=600.0)
    ranks = [job.rank(n, steps=100_000, delay=0.1) for n in range(2)]
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 2)  # it watches them
    wait(lambda: min(len(job.acked(n)) for n in range(2)) > 5)
    match word:
        case "stopped":
            for rank in ranks:
                rank.terminate()
        case "crashed":
            # Nobody sends this one, so that it is the cause whichever end is seen first.
            ranks[1].send_signal(signal.SIGSEGV)
            ranks[0].terminate()
        case "hung":
            ranks[1].send_signal(signal.SIGSTOP)
        case "vanished":  # the node is lost, and with it who could say so
            for process in (daemon, *ranks):
                kill(process)
    if word == "vanished":
        assert job.metrics() == ""
    else:
        wait(lambda: f'ddpprobe_job_state{{state="{word}"}} 1.0' in job.metrics(), 60)
        assert job.metrics().count("ddpprobe_job_state{") == 1
    path = job.run.path
    _, told, _ = call("anomalies", path)
    _, said, _ = call("anomalies", path, "--json")
    assert (told.startswith(word), json.loads(said)["end"]["state"]) == (True, word)
    assert open_run(path).info()["state"] == word
    call("report", path, "-o", path / "report.html")
    page = (path / "report.html").read_text().partition("<header>")[2]  # without its style
    assert re.findall(r"\b(stopped|crashed|hung|vanished)\b", page)[0] == word


def end_of(job) -> tuple[str, list[int], str]:
    """Return how the run ended as a reader says it, once its daemon has: both say the same.

    What the daemon told of one end, it may have told again with what came later: that counts.
    """
    (ending,) = open_run(job.run.path).endings()
    assert job.life("end")[-1] == {"event": "end", **ending.end.to_json()}
    told = [a for a in job.anomalies() if a.detector == "rank_lost"]
    read = [a for a in open_run(job.run.path).anomalies() if a.detector == "rank_lost"]
    told = [a for at, a in enumerate(told) if not any(retells(b, a) for b in told[at + 1 :])]
    assert sorted(map(framing.encode_anomaly, told)) == sorted(map(framing.encode_anomaly, read))
    return ending.end.state, list(ending.end.ranks), ending.end.how


@pytest.mark.parametrize("held", [True, False], ids=["daemon stopped", "daemon at work"])
def test_who_died_of_its_own_is_named_whenever_the_deaths_are_noticed(job, held) -> None:
    """The victims end first, or all of them while the daemon is stopped and sees no order."""
    daemon = job.daemon()
    gates = [job.run.path / f"gate_{n}" for n in range(3)]
    fails = {"world": 3, "steps": 10, "status": "exception"}
    told = job.rank(0, world=3, steps=10, hang=True)
    victim = job.rank(1, go_on=str(gates[1]), error=GONE, exit=1, **fails)
    cause = job.rank(2, go_on=str(gates[2]), error=OWN, teardown=600, **fails)
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 3)
    if held:
        daemon.send_signal(signal.SIGSTOP)
    gates[1].touch()
    victim.wait(20 * PATIENCE)
    told.terminate()
    told.wait(20 * PATIENCE)
    gates[2].touch()
    wait(lambda: b'"exception"' in job.journal_of(2))
    if not held:  # raised means failed, however slowly it exits
        wait(lambda: 'ddpprobe_job_state{state="crashed"} 1.0' in job.metrics())
        assert open_run(job.run.path).endings()[0].end.ranks == (2,)
    cause.terminate()  # the launcher's patience is over
    cause.wait(20 * PATIENCE)
    if held:
        daemon.send_signal(signal.SIGCONT)
    assert daemon.wait(30 * PATIENCE) == 0
    assert end_of(job) == ("crashed", [2], "ValueError")


def test_a_killed_rank_is_named_although_its_victims_end_was_noticed_with_it(job) -> None:
    daemon = job.daemon()
    ranks = [job.rank(n, world=3, steps=10, hang=True) for n in range(3)]
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 3)
    daemon.send_signal(signal.SIGSTOP)
    ranks[1].kill()
    ranks[1].wait(20 * PATIENCE)
    for rank in (ranks[0], ranks[2]):
        rank.terminate()
        rank.wait(20 * PATIENCE)
    daemon.send_signal(signal.SIGCONT)
    assert daemon.wait(30 * PATIENCE) == 0
    assert end_of(job) == ("crashed", [1], "SIGKILL")
    assert [a.level for a in job.anomalies()] == ["page", "info", "info"]


def test_a_suspended_rank_is_named_while_it_lasts_and_when_its_launcher_has_killed_it(
    job, capsys
) -> None:
    daemon = job.daemon()
    waiting, stopped = job.rank(0, steps=10, hang=True), job.rank(1, steps=10, hang=True)
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 2)
    wait(lambda: len(job.acked(1)) == 10)
    stopped.send_signal(signal.SIGSTOP)
    wait(lambda: 'ddpprobe_job_state{state="hung"} 1.0' in job.metrics())
    assert re.search(r'ddpprobe_rank_stuck\{phase="data",rank="1"\} 1\.0', job.metrics())
    assert cli.main(["top", str(job.run.path), "--once"]) == 0
    # Nobody holds the run's lock: so it is on the disk of a node that rank 0 is not on.
    assert "hung: rank 1, after step 10, was suspended" in capsys.readouterr().out
    assert cli.main(["top", f"http://{job.said()['listen']}", "--once"]) == 0
    assert "hung: rank 1 is behind the others" in capsys.readouterr().out
    wait(lambda: 'detector="rank_lost",level="page"} 1.0' in job.metrics())
    waiting.terminate()
    waiting.wait(20 * PATIENCE)
    stopped.kill()
    assert daemon.wait(30 * PATIENCE) == 0
    assert end_of(job) == ("hung", [1], "SIGSTOP")


def test_a_job_that_is_told_to_stop_blames_nobody(job) -> None:
    daemon = job.daemon()
    ranks = [job.rank(n, steps=10, hang=True) for n in range(2)]
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 2)
    for rank in ranks:
        rank.terminate()
        rank.wait(20 * PATIENCE)
    assert daemon.wait(30 * PATIENCE) == 0
    assert end_of(job) == ("stopped", [], "SIGTERM")
    assert [(a.level, a.rank) for a in job.anomalies()] == [("info", None)]


def test_all_ranks_killed_at_once_leave_a_sealed_run(job) -> None:
    daemon = job.daemon()
    ranks = [job.rank(n, world=3, steps=10_000) for n in range(3)]
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 3)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.wait()
    assert daemon.wait(30 * PATIENCE) == 0
    steps, deaths = job.merged_steps(), job.life("death")
    assert steps == list(range(len(steps)))
    assert max(job.acked(n)[-1] for n in range(3)) <= steps[-1]
    assert [d["signal"] for d in deaths] == ["SIGKILL"] * 3
    end = job.life("end")[-1]  # together, or proven to be one after the other
    assert (end["state"], end["how"]) in {("unknown", "SIGKILL"), ("crashed", "SIGKILL")}
    assert any(a.level == "page" for a in job.anomalies())


@pytest.mark.parametrize("draw", range(3))
def test_a_killed_daemon_is_followed_without_loss_or_duplicate(job, draw) -> None:
    rng = random.Random(draw)
    ranks = [job.rank(n, steps=300, delay=0.008, bad=100 if n else None) for n in range(2)]
    while any(rank.poll() is None for rank in ranks):
        daemon = job.daemon()
        try:
            daemon.wait(rng.uniform(0.3, 1.6))  # the moment of death is drawn, not waited for
        except subprocess.TimeoutExpired:
            kill(daemon)
    assert job.daemon().wait(30 * PATIENCE) == 0
    assert job.merged_steps() == list(range(300))
    assert job.acked(0) == job.acked(1) == list(range(300))
    assert [(a.step, a.rank) for a in job.anomalies()] == [(100, 1)]
    assert job.life("death") == []


def test_verdicts_that_the_killed_daemon_could_not_write_are_written_once(tmp_path) -> None:
    """The journal ends between a record and its anomaly."""
    meta = {"role": "daemon", "head": True}
    _rank_spec = importlib.util.spec_from_file_location(
        "rank_process", Path(__file__).parents[1] / "distributed" / "rank_process.py"
    )
    rank_process = importlib.util.module_from_spec(_spec_of(_rank_spec))
    _rank_spec.loader.exec_module(rank_process)

    class Silent:
        def update(self, _):
            return []

        def finish(self):
            return []

    first = DaemonJournal(tmp_path, meta, Silent())
    for step in range(5):
        first.take(rank_process.record(0, step, bad=step == 3))
    first.death(0, "SIGKILL", 17, 4)
    first.close()
    for _ in range(2):
        again = DaemonJournal(tmp_path, meta, default_suite())
        assert again.last_step == 4
        assert again.anomalies == {("nonfinite", "page"): 1}
        assert again.deaths == {0}
        again.close()
    tail = JournalTail(tmp_path)
    frames = list(tail.poll())
    tail.close()
    assert [f.type for f in frames].count(framing.ANOMALY) == 1
    assert [f.seq for f in frames] == list(range(len(frames)))


def test_an_end_that_is_told_again_with_what_came_later_is_one_anomaly(tmp_path) -> None:
    hang = replace(
        ANOMALY, detector="rank_lost", module=None, kind=None, message="it hangs", values={}
    )
    more, other = replace(hang, message="it hung until it was ended"), replace(hang, rank=5)
    first = DaemonJournal(tmp_path, {"role": "daemon", "head": True}, default_suite())
    for found in ([hang], [hang], [more, other]):
        first.lose(End("hung", (hang.rank,)), found)
    first.close()
    again = DaemonJournal(tmp_path, {"role": "daemon", "head": True}, default_suite())
    again.close()
    for daemon_journal in (first, again):
        assert daemon_journal.lost == [hang, more, other]
        assert daemon_journal.anomalies == {("rank_lost", hang.level): 2}
        assert daemon_journal.blamed == {hang.rank: {hang.level: 1}, 5: {hang.level: 1}}


def _spec_of(spec):
    assert spec is not None
    return spec


def test_a_full_disk_under_its_journal_costs_frames_and_nothing_else(job) -> None:
    """A tmpfs of 64 kB, full from the start, that is given space later."""
    place = job.run.daemon_journal(0, "node_0000")
    place.mkdir(parents=True)
    daemon = job.daemon(prefix=full_disk(place, 64 << 10))
    rank = job.rank(0, world=1, steps=2000, delay=0.01, bad=10)
    page = 'ddpprobe_anomalies_total{detector="nonfinite",level="page"} 1.0'
    wait(lambda: page in job.metrics() and "ddpprobe_records_dropped_total{" in job.metrics())
    inside = Path(f"/proc/{daemon.pid}/root{place}")
    (inside / "filler").unlink()
    wait(lambda: any(path.stat().st_size > 4096 for path in inside.glob("*.wal")))
    assert rank.poll() is None


def unrecorded(job: daemon_harness.Harness) -> dict[str, float]:
    found = re.findall(r'unrecorded_steps\{rank="(\d)"\} (\S+)', job.metrics())
    return {rank: float(count) for rank, count in found}


def test_steps_that_never_reach_the_journal_are_counted_per_rank_while_it_happens(job) -> None:
    first = job.daemon()
    # A file may not grow any more (EFBIG); a heartbeat is overwritten in place. A refusal may be
    # a matter of a moment only, so what the rank has in its journal is asked, not assumed.
    job.rank(0, steps=30, limited=10, hang=True)
    job.rank(1, steps=30, hang=True)
    wait(lambda: unrecorded(job) == {"0": 20.0, "1": 0.0})
    assert (job.acked(0), job.acked(1)) == (list(range(10)), list(range(30)))
    kill(first)
    wait(lambda: unrecorded(job) == {})
    job.daemon()  # the journals are whole from their first segment on: it knows as much
    wait(lambda: unrecorded(job) == {"0": 20.0, "1": 0.0})


def test_a_daemon_without_the_first_records_counts_what_is_lost_from_its_start_on(tmp_path) -> None:
    directory = tmp_path / "rank"
    writer = JournalWriter(directory, {"rank": 0}, segment_frames=4)
    for step in range(9):
        writer.append_record(made_record(0, step))
    beat = Heartbeat(1, 9, 0, "data", 9, 0, 9, (0.0, 0.0, 0.0, 0.0), 0.0)
    fresh = LocalRank(RankTail(directory, 0))
    assert len(fresh.tail.read(100)) == 9
    fresh.compare(beat)
    assert fresh.unrecorded == 0
    (directory / "00000000.wal").unlink()  # folded
    later = LocalRank(RankTail(directory, 0))
    assert 0 < len(later.tail.read(100)) < 9
    later.compare(beat)
    assert later.unrecorded == 0
    later.compare(replace(beat, sampled=12))
    assert later.unrecorded == 3
    writer.append_record(made_record(0, 9))  # that one was on its way
    later.tail.read(100)
    later.compare(replace(beat, sampled=12))
    assert later.unrecorded == 2
    for rank in (fresh, later):
        rank.tail.close()
    writer.close()


@pytest.mark.parametrize(
    ("words", "patience"),
    [
        ({"at_exit": True}, LEAVING_SECONDS),
        ({"at_exit": False}, PATIENCE_SECONDS),  # its script may go on for ever
        ({"at_exit": True, "threads": ("loader",)}, PATIENCE_SECONDS),  # and so may these
        ({"at_exit": True, "status": "exception"}, PATIENCE_SECONDS),  # which is told at once
    ],
)
def test_the_exit_code_of_whose_interpreter_ends_is_waited_for(
    tmp_path: Path, words: dict[str, Any], patience: float
) -> None:
    """A torch process takes long to end on a busy machine."""
    writer = JournalWriter(tmp_path / "rank", {"rank": 0})
    writer.append_event(ClosedEvent(**words))
    writer.close()
    rank = LocalRank(RankTail(tmp_path / "rank", 0), seen_alive=True, closed_at=100.0)
    rank.tail.read(100)
    assert not rank.is_over(100.0 + patience)
    assert rank.is_over(100.1 + patience)
    rank.exit = Exit((0, 0), "exit:5", 1)
    assert rank.is_over(100.0)
    rank.tail.close()


def test_the_second_daemon_of_a_node_leaves_at_once_and_says_so(job) -> None:
    job.daemon()
    wait(job.said)
    second = job.daemon()
    assert second.wait(20 * PATIENCE) == 0
    assert "one serves node_0000" in job.log()
    assert job.said()["pid"] != second.pid


@pytest.mark.parametrize("state", STATES)
def test_behind_an_end_that_is_an_alert_it_is_there_until_the_alert_is_sent(state: str) -> None:
    scrape, evaluation, group_wait = 60, 15, 30  # Prometheus's and Alertmanager's defaults
    told = state in {"crashed", "hung", "vanished", "unknown"}
    assert (linger_of(None, state) > scrape + evaluation + group_wait) is told
    assert linger_of(7.0, state) == 7.0


def counted(text: str) -> dict[str, float]:
    """Return the counters of an exposition that count what was found."""
    names = ("anomalies_total", "nonfinite_elements_total", "orders_total", "dropped_total")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    of_found = [x for x in lines if x[0].partition("{")[0].endswith(names)]
    return {series: float(value) for series, _, value in of_found}


def test_what_was_found_in_an_attempt_still_counts_in_the_next_one(job) -> None:
    """An increase that lies between two scrapes would be lost if the counters fell meanwhile."""
    daemon = job.daemon(0, linger=600.0)
    page = 'ddpprobe_anomalies_total{detector="nonfinite",level="page"}'
    blamed = 'ddpprobe_rank_anomalies_total{level="page",rank="0"}'
    bad = 'ddpprobe_nonfinite_elements_total{kind="grad_output",rank="0"}'
    before: dict[str, float] = {}

    def has_found(pages: int) -> bool:
        """Look once; what is there at every look never falls."""
        now = counted(job.metrics())
        assert all(now.get(series, value) >= value for series, value in before.items())
        before.update(now)
        return before.get(page) == pages

    for attempt in (0, 1):
        job.rank(0, world=1, steps=9, attempt=attempt, bad=5, hang=attempt > 0)
        wait(lambda n=attempt: has_found(n + 1))
        assert (before[blamed], before[bad]) == (attempt + 1, 3 * (attempt + 1))
        if not attempt:
            wait(lambda: job.life("finished"))
    # Nor do they for its successor.
    kill(daemon)
    daemon.wait(20 * PATIENCE)
    job.daemon(0, linger=600.0)
    wait(lambda: (now := counted(job.metrics())).get(page) == 2 and {**before, **now} == before)


def test_a_new_attempt_is_followed_while_the_daemon_lingers(job) -> None:
    daemon = job.daemon(0, linger=600.0)
    old = [job.rank(n, steps=20, hang=True) for n in range(2)]
    wait(lambda: job.metrics().count("ddpprobe_rank_up{") == 2)  # else it has nothing to linger for
    wait(lambda: all(len(job.acked(n)) == 20 for n in range(2)))
    for rank in old:
        kill(rank)
    wait(lambda: job.life("finished"))
    job.rank(0, world=1, steps=30, first=15, attempt=1, bad=40)
    wait(lambda: job.life("finished", attempt=1))
    daemon.terminate()
    assert daemon.wait(20 * PATIENCE) == 0
    assert job.merged_steps() == list(range(20))
    assert job.merged_steps(1) == list(range(15, 45))
    assert [a.attempt for a in job.anomalies(1)] == [1]


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGKILL, "crashed"), (signal.SIGTERM, "stopped")]
)
def test_an_attempt_that_another_one_follows_is_counted_by_how_it_ended(
    job, number: signal.Signals, state: str
) -> None:
    daemon = job.daemon(0, linger=600.0)
    old = job.rank(0, world=1, steps=20, hang=True)
    wait(lambda: "ddpprobe_rank_up{" in job.metrics())
    assert f'ddpprobe_restarts_total{{state="{state}"}} 0.0' in job.metrics()
    old.send_signal(number)
    old.wait(20 * PATIENCE)
    wait(lambda: job.life("finished"))
    job.rank(0, world=1, steps=30, first=15, attempt=1)
    wait(lambda: f'ddpprobe_restarts_total{{state="{state}"}} 1.0' in job.metrics())
    counted = re.findall(r"^ddpprobe_restarts_total.* (\S+)$", job.metrics(), re.MULTILINE)
    assert sorted(map(float, counted)) == [0.0] * 5 + [1.0]
    daemon.terminate()
    assert daemon.wait(20 * PATIENCE) == 0


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGKILL, "crashed"), (signal.SIGTERM, "stopped"), (0, "ended")]
)
def test_a_daemon_of_a_later_attempt_counts_those_before_it(job, number: int, state: str) -> None:
    """As launchers do that end the daemon with the ranks, or start the job on another machine."""
    daemon = job.daemon()
    old = job.rank(0, world=1, steps=20, hang=bool(number))
    wait(lambda: len(job.acked(0)) == 20)
    if number:
        old.send_signal(number)
    assert daemon.wait(30 * PATIENCE) == 0
    for attempt in (1, 2):
        rank = job.rank(0, world=1, steps=20, hang=True, attempt=attempt)
        daemon = job.daemon()
        wait(lambda: "ddpprobe_attempt " in job.metrics())
        told = {state: 1.0} if attempt == 1 else {state: 1.0, "crashed": 1.0 + (state == "crashed")}
        shown = re.findall(
            r"^ddpprobe_restarts_total.*\"(\w+)\"} (\S+)$", job.metrics(), re.MULTILINE
        )
        assert {name: float(count) for name, count in shown if float(count)} == told
        kill(rank)
        assert daemon.wait(30 * PATIENCE) == 0


def test_a_new_attempt_ends_the_one_before_although_a_rank_of_it_seems_alive(job) -> None:
    daemon = job.daemon()
    job.rank(0, world=1, steps=10, hang=True)
    wait(lambda: len(job.acked(0)) == 10)
    job.rank(0, world=1, steps=10, attempt=1)
    assert daemon.wait(30 * PATIENCE) == 0
    assert len(job.life("finished")) == 1
    assert job.merged_steps(1) == list(range(10))


def test_a_dead_run_is_sealed_by_hand_and_then_the_daemon_ends(job) -> None:
    ranks = [job.rank(n, steps=100, delay=0.0, closed=False, bad=80) for n in range(2)]
    for rank in ranks:
        rank.wait(30 * PATIENCE)
    assert job.daemon(0, linger=60.0).wait(30 * PATIENCE) == 0
    assert job.merged_steps() == list(range(100))
    told = [(a.detector, a.step, a.rank) for a in job.anomalies()]
    assert told == [("nonfinite", 80, None), ("rank_lost", 100, None)]  # both ranks have it
    assert [d["signal"] for d in job.life("death")] == ["unknown", "unknown"]
    assert (job.life("end")[-1]["state"], job.life("end")[-1]["ranks"]) == ("vanished", [])
    assert (
        job.daemon(0, "--wait", "0.5").wait(30 * PATIENCE) == 0
    )  # and once more: nothing is left to do
    assert job.merged_steps() == list(range(100))
    assert len(job.life("death")) == 2
    (said,) = {
        (r["state"], r["pages"], r["cause_detector"], r["cause_step"]) for r in overview(job)
    }
    assert said == ("vanished", 2, "nonfinite", 80)


def test_sigterm_ends_it_at_once_and_a_later_daemon_goes_on(job) -> None:
    first, end = job.daemon(), job.run.path / "end"
    rank = job.rank(0, world=1, steps=1_000_000, delay=0.05, end=str(end))
    wait(lambda: len(job.acked(0)) > 20)
    wait(job.said)
    first.terminate()
    assert first.wait(10 * PATIENCE) == 0
    assert job.said() is None
    assert rank.poll() is None
    later = job.daemon()
    wait(job.said)
    with daemon_harness.stopped([rank]):
        steps = len(job.acked(0)) + 20
        end.write_text(str(steps))
    assert later.wait(30 * PATIENCE) == 0
    assert job.acked(0) == job.merged_steps() == list(range(steps))
    assert len(job.life("finished")) == 1


@pytest.mark.parametrize(("exit_code", "state"), [(0, "ended"), (5, "unknown")])
def test_told_to_end_as_its_rank_has_ended_it_says_how(job, exit_code, state) -> None:
    """What ends a job ends its daemon in the same moment: it learns of both at once."""
    daemon, gate = job.daemon(), job.run.path / "gate"
    rank = job.rank(0, world=1, steps=5, go_on=str(gate), exit=exit_code)
    wait(lambda: "ddpprobe_rank_up{" in job.metrics())  # else there is no exit to see
    with daemon_harness.stopped([daemon]):
        gate.touch()
        assert rank.wait(30 * PATIENCE) == exit_code
        daemon.terminate()
    assert daemon.wait(30 * PATIENCE) == 0
    run = open_run(job.run.path)
    assert run.endings()[0].end.state == state
    said = (
        "rank 0 had closed, after step 5, and then ended with exit code 5: by what the script did "
        "after its training, or because that had failed"
    )
    assert [a.message for a in run.anomalies()] == ([said] if exit_code else [])
    assert len(job.life("finished")) == 1


def test_without_any_rank_it_ends_after_its_patience(job) -> None:
    assert job.daemon(0, "--wait", "0.3").wait(20 * PATIENCE) == 0


def test_two_daemons_on_one_machine_take_different_ports(job, tmp_path) -> None:
    ports = ["--listen", "127.0.0.1:18377"]
    job.daemon(0, *ports)
    job.daemon(1, *ports)
    listen = {wait(lambda n=n: job.said(n))["listen"] for n in (0, 1)}
    assert len(listen) == 2


def test_what_it_leaves_is_nobody_else_s_to_read(job) -> None:
    daemon = job.daemon()
    job.rank(0, world=1, steps=5)
    assert daemon.wait(30 * PATIENCE) == 0
    for path in (job.run.path / "journal").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_daemon_loads_no_torch_and_zarr_only_to_fold() -> None:
    code = "import sys, ddpprobe.daemon.__main__; print({'torch', 'zarr'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_what_serves_inside_a_test_takes_no_signal_from_those_behind_it(tmp_path) -> None:
    before = [signal.getsignal(number) for number in TAKEN]
    run = RunDir(paths.make_dir(tmp_path / "run"))
    paths.write_json(run.run_json, {"run_id": "r", "format_version": 1})
    words = ["--dir", str(run.path), "--listen", "127.0.0.1:0", "--wait", "0"]
    with handlers_kept():
        assert main(words) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert [signal.getsignal(number) for number in TAKEN] == before


def test_a_launcher_can_wait_for_the_end_of_the_one_that_serves(
    tmp_path, monkeypatch, capsys
) -> None:
    run = RunDir(paths.make_dir(tmp_path / "run"))
    paths.write_json(run.run_json, {"run_id": "r", "format_version": 1})
    paths.make_dir(run.path / "daemon")
    other = paths.DirectoryLock(run.daemon_file(NODE, "lock"))
    assert other.acquire()
    pauses, sleep = [], time.sleep

    def ends_after_a_while(seconds: float) -> None:
        if seconds == AFTER_PAUSE_SECONDS:
            pauses.append(seconds)
            if len(pauses) == 3:
                other.release()
        else:
            sleep(seconds)

    monkeypatch.setattr(time, "sleep", ends_after_a_while)
    words = ["--dir", str(run.path), "--node", NODE, "--listen", "127.0.0.1:0", "--wait", "0"]
    assert main(words) == 0
    assert "one serves node_0000" in capsys.readouterr().err
    with handlers_kept():
        assert main([*words[:-2], "--after"]) == 0
    assert len(pauses) == 3
    assert "one serves" not in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_wrong_use(tmp_path, capsys) -> None:
    assert main(["--dir", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--head", "10.0.0.1:13378"], {}, "write http://HOST:PORT"),
        ([], {"DDPPROBE_LINGER": "soon"}, "DDPPROBE_LINGER='soon' is no number of seconds"),
    ],
)
def test_wrong_use_is_said_in_one_line(
    tmp_path, capsys, monkeypatch, arguments, environment, says
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["--dir", str(tmp_path), *arguments]) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert "Traceback" not in printed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB where the run directory will be."""
    place = tmp_path / "run"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "none", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_delays_the_store_and_ends_nothing(small_disk, job, tmp_path) -> None:
    daemon = job.daemon(0, linger=600.0)
    end = tmp_path / "end"
    # A goodbye larger than what may be left of the journal's last page.
    last_words = {"world": 1, "end": str(end), "error": {"message": "x" * 8192}}
    rank = job.rank(0, steps=100_000, delay=0.05, **last_words)
    wait(lambda: len(job.acked(0)) > 20 and "ddpprobe_rank_up{" in job.metrics())
    with (small_disk / "filler").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
    end.with_suffix(".new").write_text("0")
    end.with_suffix(".new").replace(end)
    assert rank.wait(30 * PATIENCE) == 0
    # Its goodbye found no room; its exit code and its heartbeat, written in place, say the same.
    wait(lambda: 'ddpprobe_job_state{state="ended"} 1.0' in job.metrics())
    wait(lambda: "ddpprobe_job_finished 1.0" in job.metrics())
    assert daemon.poll() is None
    assert job.merged_steps() == []
    (small_disk / "filler").unlink()
    # What the daemon's own journal had no room for comes behind the rest.
    wait(lambda: job.merged_steps()[:20] == list(range(20)))
    assert daemon.poll() is None


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], paths.RunDir]:
    """A run that is over and nobody has sealed; the disk refuses as many seals as one says."""
    run = Made(tmp_path / "run").whole(10, told=False).close()
    paths.make_dir(run.path / "daemon")
    seal = StoreWriter.seal

    def served(refusals: int) -> paths.RunDir:
        left = iter(range(refusals))

        def refusing(store: StoreWriter, unread: Mapping[tuple[int, int], int]) -> int:
            if next(left, None) is not None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return seal(store, unread)

        monkeypatch.setattr(StoreWriter, "seal", refusing)
        NodeDaemon(DaemonOptions(run, NODE, "127.0.0.1:0", linger=0.0, wait=1.0)).serve()
        return run

    monkeypatch.setattr(folding, "PAUSE_SECONDS", 0.0)
    return served


def test_a_seal_that_the_disk_refuses_for_a_moment_at_the_end_is_tried_again(over, caplog) -> None:
    run = open_run(over(folding.LAST_TRIES).path)
    assert "the store cannot be written, retrying" in caplog.text
    assert "finish it with" not in caplog.text
    assert run.info()["unsealed"] == []
    assert run.info()["attempts"][0]["sealed"]
    assert list(run.path.rglob("rank_*/*.wal")) == []


def test_a_seal_that_the_disk_refuses_to_the_last_is_said_and_a_later_daemon_makes_it(
    over, caplog, capsys
) -> None:
    path = over(100).path
    command = f"ddpprobe daemon --dir {path} --node {NODE}"
    assert f"finish it with: {command}" in caplog.text
    found = open_run(path).info()
    assert found["unsealed"] == [{"node": NODE, "finish": command}]
    assert (found["attempts"][0]["sealed"], found["attempts"][0]["unsealed"]) == (False, [NODE])
    assert cli.main(["info", str(path)]) == 0
    assert f"{NODE} is not all in the store; finish with: {command}" in capsys.readouterr().out
    assert verify(open_run(path)).ok
    assert [r.step for r in open_run(path).records(0)] == list(range(10))  # from the journal

    over(0)
    later = open_run(path)
    assert (later.info()["unsealed"], later.info()["attempts"][0]["sealed"]) == ([], True)
    assert verify(later).ok
    assert [step for step, _ in StoredGroup(paths.RunDir(path), MERGED).steps()] == [*range(10)]


def test_a_damaged_store_is_said_and_the_ranks_rows_stay_in_the_journal(job) -> None:
    """A file where a directory of the store belongs."""
    (job.run.path / "manifest").write_text("in the way")
    daemon = job.daemon()
    job.rank(0, world=1, steps=10)
    assert daemon.wait(30 * PATIENCE) == 0
    assert "is damaged" in job.log()
    assert len([1 for t, _ in job.frames() if t == framing.RECORD]) == 10


def full_disk(place: Path, size: int) -> list[str]:
    """Return the prefix of a command that sees a full file system of `size` bytes at `place`."""
    allowed = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("mount namespaces are not permitted here")
    mount = f'mount -t tmpfs -o size={size} none "$0" && head -c {size} /dev/zero >"$0/filler"'
    return ["unshare", "-rm", "sh", "-c", f'{mount}; exec "$@"', str(place)]


def test_the_lock_survives_a_look_at_it(job) -> None:
    """`is_locked` takes the lock for an instant; a daemon that starts then must not give up."""
    daemon = job.daemon()
    for _ in range(2000):
        paths.is_locked(job.run.daemon_file("node_0000", "lock"))
        if job.said():
            break
    wait(job.said)
    assert daemon.poll() is None
