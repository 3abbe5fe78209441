"""What a run looks like while it trains: the worst first, in whatever space there is."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import math
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from ddpprobe.cli.main import main
from ddpprobe.cli.top_frame import ago, frame
from ddpprobe.ends.anomalies import RANK_LOST, TITLES
from ddpprobe.ends.end import HUNG, End
from ddpprobe.metrics.render import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE, render
from ddpprobe.reader.live.live_from_files import NO_DAEMON, RunWatch
from ddpprobe.reader.live.live_from_metrics import NoMetricsError, UrlWatch, fetch, target
from ddpprobe.reader.live.live_view import LiveView, RankNow, SiteNow, worst_ranks, worst_sites
from ddpprobe.reader.run import open_run
from ddpprobe.reader.under_way import is_here
from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.merge import merge_all
from ddpprobe.records.node_view import FirstFailure, NodeView, RankView
from ddpprobe.records.step import Anomaly, Site, StepRecord
from ddpprobe.rundir import framing, paths, tmpfs
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import DirectoryLock
from ddpprobe.store.writer import StoreWriter

from ...distributed.daemon_harness import harness, wait
from ...made_runs import ANOMALY, NODE, Made, record
from ...waiting import PATIENCE, deadline

EVIL = "a\x1b[31m\n\u202e\u6f22\u5b57" * 9


def text(now: LiveView, width: int = 100, height: int = 40) -> str:
    return "\n".join(line for _, line in frame(now, width, height))


# ---- the frame


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(20, 200), height=st.integers(10, 80), ranks=st.integers(0, 60),
    sites=st.integers(0, 40), anomalies=st.integers(0, 9),
)  # fmt: skip
def test_a_frame_fits_whatever_there_is_to_say(width, height, ranks, sites, anomalies):
    now = LiveView(
        EVIL, "live", EVIL, ranks, tuple(RankNow(i, "up", device=EVIL) for i in range(ranks)),
        tuple(SiteNow(EVIL, math.nan, math.inf, 1, 1e9) for _ in range(sites)), (EVIL,) * anomalies,
    )  # fmt: skip
    lines = [line for _, line in frame(now, width, height)]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)


def test_of_a_thousand_ranks_the_worst_are_shown_and_the_rest_is_summed_up():
    ranks = [RankNow(i, "up", step=500, rate=2.0, seen=1.0) for i in range(1000)]
    ranks[700] = RankNow(700, "dead", "SIGKILL", step=412, seen=60.0)
    ranks[31] = RankNow(31, "late", "backward", step=498, seen=99.0)
    ranks[5] = replace(ranks[5], pages=1)
    ranks[9] = replace(ranks[9], loss=math.nan)
    ranks[8] = replace(ranks[8], step=499)
    sites = tuple(SiteNow(f"blocks.{i}:output", 1.0, 1.0, 0, 1.0) for i in range(1500))
    now = LiveView("r", "live", "/r", 1000, worst_ranks(ranks), worst_sites(sites), ("PAGE x",))
    lines = [line for _, line in frame(now, 80, 24)]
    assert len(lines) <= 24
    first = [line.split()[:2] for line in lines[4:9]]
    assert first == [["700", "dead"], ["31", "late"], ["5", "up"], ["9", "up"], ["8", "up"]]
    (rest,) = [line for line in lines if line.startswith("and ")]
    assert "up, steps 500 to 500, seen 1s ago at most" in rest
    shown = sum(line.split()[1:2] in (["up"], ["dead"], ["late"]) for line in lines[4:])
    assert int(rest.split()[1]) == 1000 - shown
    assert lines[-2:] == ["anomalies (1)", "PAGE x"]


def test_the_title_says_how_many_ranks_of_a_run_are_late():
    ranks = (RankNow(0, "late", "backward"), RankNow(1, "up"), RankNow(2, "late", "forward"))
    assert text(LiveView("r", "running", "/r", 3, ranks)).startswith(
        "r · running, 2 late · 3 ranks"
    )
    assert text(LiveView("r", "running", "/r", 1, ranks[1:2])).startswith("r · running · 1 rank ")


def test_worst_sites_are_nonfinite_then_growing_then_large():
    nan = math.nan
    known = {"calm": (9.0, 1.0, 0, 1.0), "grows": (1.0, 1.0, 0, 50.0), "bad": (nan, nan, 7, None)}
    sites = [SiteNow(name, *numbers) for name, numbers in (known | {"new": (99.0, 1.0, 0)}).items()]
    assert [s.site for s in worst_sites(sites)] == ["bad", "grows", "calm", "new"]


def test_what_a_first_cause_names_comes_before_all_that_followed_though_these_are_worse():
    sites = [SiteNow("a:output", math.nan, math.nan, 99), SiteNow("b:output", 1.0, 1.0, 1),
             SiteNow("c.w:update", 1.0, 1.0, 0, 1.0)]  # fmt: skip
    found = worst_sites(sites, ["c.w:update", "gone:buffer", "b:output"])
    assert [s.site for s in found] == ["c.w:update", "gone:buffer", "b:output", "a:output"]
    assert [s.guilty for s in found] == [True, True, True, False]
    lines = text(LiveView("r", "running", "/r", sites=found), 60).splitlines()
    (told,) = (line.split() for line in lines if "gone:buffer" in line)
    assert told == ["-", "-", "-", "-", "gone:buffer", "(first", "cause)"]
    assert [i for i, line in enumerate(lines) if "(first cause)" in line] == [6, 7, 8]


def test_second_moments_and_changes_are_listed_only_where_they_are_not_finite():
    grown = (1.0, 1.0, 0, 7e4)
    known = {"a:output": (1.0, 1.0, 0, 2.0), "a.w[exp_avg_sq]:optim_state": grown,
             "a.w:update": grown}  # fmt: skip
    sites = [SiteNow(name, *numbers) for name, numbers in known.items()]
    assert [s.site for s in worst_sites(sites)] == ["a:output"]
    bad = [SiteNow("b.w[exp_avg_sq]:optim_state", math.nan, math.nan, 3),
           SiteNow("c.w:update", math.nan, math.nan)]  # fmt: skip
    names = [s.site for s in worst_sites([*sites, *bad])]
    assert names == ["b.w[exp_avg_sq]:optim_state", "c.w:update", "a:output"]


def transformer(step: int, grown: str, sick: float) -> StepRecord:
    """A step of a transformer of 12 blocks, in which `grown` is `sick` times as large as usual.

    A bias of the keys moves all scores of a query alike, which softmax takes back: its gradient is
    what rounding leaves, and may be 100 times that at the next step.
    """
    peaks: dict[Site, float] = {}
    for i in range(12):
        for name, usual in (("attn.q", 3e-3), ("attn.k", 3e-3), ("mlp.up", 2e-2), ("norm", 8e-4)):
            module = f"blocks.{i}.{name}"
            peaks[Site(f"{module}.weight", "grad", placement="replicated")] = usual * (1 + i / 12)
            noise = 1e-12 * 100.0**step if name == "attn.k" else usual / 10
            peaks[Site(f"{module}.bias", "grad", placement="replicated")] = noise
            peaks[Site(module, "output")] = 4.0 + i
    peaks[next(s for s in peaks if str(s) == grown)] *= sick
    made = record(0, step, len(peaks), sites=tuple(peaks))
    peak = np.array([*peaks.values()])
    made.values[:] = np.stack([-peak, peak, 0 * peak, peak**2], axis=1)
    return made


@pytest.mark.parametrize(
    "grown", ["blocks.7.mlp.up.weight:grad", "blocks.3.norm.bias:grad", "blocks.5.attn.q:output"]
)
def test_of_a_transformer_the_layer_that_grew_is_worst_and_no_bias_of_keys(tmp_path, grown):
    made = Made(tmp_path / "run", ranks=1)
    for step in (0, 1):
        made.tell(framing.RECORD, merge_all([transformer(step, grown, 1.0 + 4 * step)]))
    watch = RunWatch(open_run(made.close().path))
    worst, *rest = watch.look().sites
    watch.close()
    assert (worst.site, worst.growth) == (grown, pytest.approx(5))
    noise = {s.site: s.growth for s in rest if s.site.endswith("attn.k.bias:grad")}
    assert noise == pytest.approx(dict.fromkeys(noise, 100.0))  # told as it is
    assert {s.site for s in rest[-12:]} == set(noise)


def test_of_sites_a_daemon_calls_not_finite_the_order_is_the_same_however_they_come():
    nan = math.nan
    sites = [SiteNow("a:grad", nan, nan, None, nan), SiteNow("b:grad", 1.0, 1.0, None, 2.0),
             SiteNow("c:grad", 2.0, 1.0, None, 1.0)]  # fmt: skip
    for order in permutations(sites):
        assert [s.site for s in worst_sites(order)] == ["a:grad", "b:grad", "c:grad"]


def test_ages_are_short():
    assert [ago(s) for s in (0.2, 99, 150, 7200, 2e5)] == ["0s", "99s", "2m", "2h", "2d"]


def test_columns_that_matter_less_go_first_where_it_is_narrow():
    now = LiveView(
        "r", "live", "/r", 1, (RankNow(0, "up", step=3, resident_bytes=5e9, device="cuda:0"),)
    )
    assert "device" in text(now, 120)
    assert "device" not in text(now, 60)
    assert "local norm" in text(now, 60)
    assert text(now, 20).split("\n")[3].split() == ["rank", "state", "step"]


def test_the_norm_of_a_rank_and_that_of_the_reduced_gradients_have_unlike_names():
    now = LiveView("r", "live", "/r", 1, (RankNow(0, "up", grad_norm=2.0),), grad_norm=3.0)
    title, head, row = (text(now).split("\n")[i] for i in (0, 3, 4))
    assert "reduced grad norm 3" in title
    at = head.index("local norm") + len("local norm")
    assert row[:at].split()[-1] == "2"


# ---- a run directory


@pytest.fixture(params=[socket.gethostname()], ids=["this machine"])
def lively(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Made]:
    """A run of two ranks under way, with a daemon."""
    made = Made(tmp_path / "run", hostname=request.param).whole(6)
    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()
    yield made
    lock.release()


def beat(made: Made, rank: int, step: int, state: str = "backward", ago: float = 0.0) -> None:
    path = made.run.heartbeat(made.attempt, NODE, rank)
    writer = HeartbeatWriter(path)
    now = time.time_ns
    try:
        time.time_ns = lambda: now() - int(ago * 1e9)
        writer.beat(
            step=step, micro=0, state=STATES.index(state), steps=step, skipped=0, sampled=step,
            phase_seconds=(0.1 * step, 0.3 * step, 0.6 * step, 0.0), probe_seconds=0.0,
        )  # fmt: skip
    finally:
        time.time_ns = now
    writer.close()


def test_a_live_run_shows_its_ranks_sites_anomalies_and_host(lively):
    beat(lively, 0, 6)
    beat(lively, 1, 5, ago=60.0)
    for n, cpu in ((1, 10.0), (6, 12.5)):
        ranks = {"1": {"resident_bytes": 2**30, "cpu_seconds": cpu}}
        lively.tell(
            framing.SAMPLE, {"time_ns": n * 10**9, "host": {"cpu_ratio": 0.5}, "ranks": ranks}
        )
    watch = RunWatch(open_run(lively.path))
    now = watch.look()
    assert (now.name, now.state, now.world_size, now.sampled_step) == ("made", "running", 2, 5)
    late, up = now.ranks
    assert (late.rank, late.state, late.why, late.step) == (1, "late", "backward", 5)
    assert 60 <= late.seen < 70
    assert (late.resident_bytes, late.cpus, late.device) == (2**30, 0.5, "cpu")
    assert (up.rank, up.state, up.step, up.pages) == (0, "up", 6, 1)
    assert up.rate == pytest.approx(1.0)
    assert up.phase == ("backward", pytest.approx(0.6))
    assert (up.loss, late.grad_norm) == (1 / 6, 2.0)
    merged = merge_all([record(r, 5) for r in (0, 1)])
    assert {s.site for s in now.sites} == {str(s) for s in merged.sites}
    assert (now.sites[0].site, now.sites[0].guilty) == ("blocks.1.mlp:output", True)
    assert now.anomalies == (
        "PAGE step 3 rank 0 blocks.1.mlp:output nonfinite: 3 NaN in blocks.1.mlp",
    )
    assert now.host == {"cpu_ratio": 0.5}
    # and on
    lively.tell(framing.LIFE, {"event": "death", "rank": 0, "signal": "SIGKILL", "time_ns": 1})
    lively.tell(framing.RECORD, merge_all([record(r, 6) for r in (0, 1)]))
    beat(lively, 0, 9)
    later = watch.look()
    assert later.sampled_step == 6
    assert (later.ranks[0].rank, later.ranks[0].state, later.ranks[0].why) == (0, "dead", "SIGKILL")
    assert later.ranks[0].rate > 1
    watch.close()


def test_ranks_of_a_node_with_its_own_disk_are_told_by_the_merged_steps(tmp_path):
    """Their heartbeats and journals are on another disk: the head merges what their node pushes."""
    made = Made(tmp_path / "run", ranks=4)
    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()

    def merge(step: int, ranks: tuple[int, ...], ago: float = 0.0) -> None:
        now = time.time_ns() - int(ago * 1e9)
        parts = [record(r, step, wall_time_ns=now) for r in ranks]
        missing = tuple(sorted({0, 1, 2} - set(ranks)))
        made.tell(framing.RECORD, replace(merge_all(parts), missing=missing))

    for rank in (0, 1):
        made.write([record(rank, 0)])
        beat(made, rank, 6)
    watch = RunWatch(open_run(made.path))
    merge(0, (0, 1, 2))
    merge(1, (0, 1, 2))
    now = watch.look()
    told = {r.rank: (r.state, r.why, r.step) for r in now.ranks}
    assert told[0] == ("up", "", 6)
    assert told[2] == ("up", "", 1)
    assert told[3] == ("unknown", "on another node", None)
    assert now.notes == (
        "on another node, and known by the steps that were merged here: ranks 2-3",
    )
    merge(2, (0, 1))
    told = {r.rank: (r.state, r.why, r.step) for r in watch.look().ranks}
    assert told[2] == ("late", "missing in the last merged step", 1)
    watch.close()
    # Once it has ended nobody here knows how: its node's directory does.
    lock.release()
    watch = RunWatch(open_run(made.path))
    ended = {r.rank: (r.state, r.step) for r in watch.look().ranks}
    assert ended == {0: ("dead", 6), 1: ("dead", 6), 2: ("unknown", 1), 3: ("unknown", None)}
    watch.close()
    made.close()


def test_a_node_of_which_no_step_was_merged_for_long_is_late(tmp_path):
    made = Made(tmp_path / "run", ranks=2)
    made.write([record(0, 0)])
    for step, seconds in ((0, 62.0), (1, 60.0)):
        now = time.time_ns() - int(seconds * 1e9)
        parts = [record(r, step, wall_time_ns=now) for r in (0, 1)]
        made.tell(framing.RECORD, merge_all(parts))
    beat(made, 0, 6)
    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()
    watch = RunWatch(open_run(made.path))
    (late,) = [r for r in watch.look().ranks if r.rank == 1]
    assert (late.state, late.why, late.step) == ("late", "no step merged", 1)
    assert 60 <= late.seen < 90
    watch.close()
    lock.release()
    made.close()


def test_a_restart_is_followed_and_the_end_is_seen(lively):
    beat(lively, 0, 6)
    watch = RunWatch(open_run(lively.path))
    assert watch.look().sampled_step == 5
    again = Made(lively.path, attempt=1).whole(3)
    beat(again, 0, 2)
    now = watch.look()
    assert now.sampled_step == 2
    assert {r.rank: (r.state, r.step) for r in now.ranks} == {0: ("up", 2), 1: ("starting", None)}
    beat(again, 0, 3, "closed")
    assert {r.rank: r.state for r in watch.look().ranks}[0] == "closed"
    watch.close()
    again.close()


def test_a_run_that_was_folded_and_sealed_still_shows_its_last_step(tmp_path):
    run = Made(tmp_path / "run").whole(20).close()
    folder = StoreWriter(run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    shutil.rmtree(run.path / "journal")
    watch = RunWatch(open_run(run.path))
    now = watch.look()
    assert (now.state, now.sampled_step, len(now.sites)) == ("ended", 19, 3)
    assert [s.growth for s in now.sites] == [None] * 3  # one step was read, and nothing before it
    assert now.anomalies[0].startswith("PAGE step 3 rank 0")
    assert [(r.state, r.why, r.step) for r in now.ranks] == [("closed", "", 19)] * 2
    watch.close()


def beat_of_all(made: Made, *states: str, step: int = 6, ago: float = 0.0) -> None:
    for rank, state in enumerate(states):
        beat(made, rank, step, state, ago)


def said(rank: int | None, message: str, **changes: Any) -> Anomaly:
    """What a daemon writes down of an end."""
    place = {"rank": rank, "module": None, "kind": None, "step": 6, "message": message}
    return replace(ANOMALY, detector=RANK_LOST, values={}, sampled=False, **place, **changes)


def lost_lines(now: LiveView) -> list[str]:
    return [line for line in now.anomalies if RANK_LOST in line]


def test_a_hang_is_one_anomaly_however_often_it_was_told_and_none_when_it_is_over(lively):
    beat_of_all(lively, "backward", "forward", ago=60.0)
    lively.tell(framing.LIFE, {"event": "stalled", "time_ns": 1})
    for message in ("rank 1 did not move on", "rank 1 did not move on; rank 0 waited"):
        told = End(HUNG, (1,), "hang", 6, "forward", message)
        lively.tell(framing.LIFE, {"event": "end", **told.to_json()})
        lively.tell(framing.ANOMALY, said(1, message))
    watch = RunWatch(open_run(lively.path))
    now = watch.look()
    (note,) = now.notes
    assert note.startswith("hung: rank 1, in forward of step 6")
    assert now.state == HUNG  # as `info` and `ls` say it
    (line,) = lost_lines(now)
    assert line.startswith("PAGE step 6 rank 1")
    assert {r.rank: r.pages for r in now.ranks} == {0: 1, 1: 1}  # rank 0 has a NaN
    lively.tell(framing.LIFE, {"event": "moving", "time_ns": 2})
    beat_of_all(lively, "backward", "forward", step=7)
    for each in (watch, RunWatch(open_run(lively.path))):
        now = each.look()
        each.close()
        assert (now.state, now.notes, lost_lines(now)) == ("running", (), [])
        assert {r.rank: (r.state, r.pages) for r in now.ranks} == {0: ("up", 1), 1: ("up", 0)}


@pytest.mark.parametrize(
    ("lively", "state"),
    [(socket.gethostname(), HUNG), ("another-machine", "running")],
    indirect=["lively"],
)
def test_a_reader_whose_clock_is_ahead_calls_no_run_of_another_machine_hung(
    lively: Made, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_of_all(lively, "backward", "forward", ago=600.0)  # by the clock of who reads
    watch = RunWatch(open_run(lively.path))
    now, told = watch.look(), open_run(lively.path)
    assert (now.state, told.info()["state"]) == (state, state)
    assert {r.state for r in now.ranks} == {"late" if state == HUNG else "up"}
    assert [r.seen is None for r in now.ranks] == [state != HUNG] * 2
    # One that moves while it is watched, and then does not.
    beat(lively, 0, 7, ago=590.0)
    ranks = {r.rank: r for r in watch.look().ranks}
    if state != HUNG:
        assert (ranks[0].state, ranks[1].seen) == ("up", None)
        assert ranks[0].seen is not None
        now_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 60 * 10**9)
        assert {r.state for r in watch.look().ranks} == {"late"}
    watch.close()


def test_what_its_daemon_says_of_a_run_on_another_machine_holds_whatever_the_clocks(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path / "run", hostname="another-machine").whole(6)
    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()
    beat_of_all(made, "backward", "forward")
    made.tell(framing.LIFE, {"event": "stalled", "time_ns": 1})
    watch = RunWatch(open_run(made.path))
    assert (watch.look().state, open_run(made.path).info()["state"]) == (HUNG, HUNG)
    watch.close()
    lock.release()


@pytest.mark.parametrize("hostname", [socket.gethostname(), "another-machine"])
def test_ranks_are_here_if_their_memory_is_whatever_the_names_of_hosts(
    tmp_path: Path, hostname: str
) -> None:
    made = Made(tmp_path / "run", hostname=hostname).whole(2)
    assert is_here(made.run, 0, NODE) == (hostname != "another-machine")
    memory = tmpfs.make(made.run.heartbeat(0, NODE, 0).parent, tmpfs.token())
    assert is_here(made.run, 0, NODE)
    shutil.rmtree(memory)  # as another machine sees it
    assert not is_here(made.run, 0, NODE)
    made.close()


def test_who_died_is_told_once_with_what_its_last_word_says(lively):
    beat_of_all(lively, "forward", "backward")
    watch = RunWatch(open_run(lively.path))
    assert lost_lines(watch.look()) == []
    error = {"type": "ValueError", "message": "boom"}
    lively.writer(1).append_json(
        framing.LIFE, {"event": "closed", "status": "exception", "error": error}
    )
    told = {"event": "exit", "rank": 1, "how": "exit:1", "order": 0, "witness": "w", "time_ns": 1}
    lively.tell(framing.LIFE, told)
    for message in ("rank 1 ended", "rank 1 ended, ValueError"):
        lively.tell(framing.ANOMALY, said(1, message))
    (line,) = lost_lines(watch.look())
    assert "ValueError" in line
    watch.close()


def test_before_the_first_step_is_done_no_rank_is_late(lively):
    """It may compile, or wait for its data: how long a step takes is not known."""
    beat_of_all(lively, "forward", "start", step=0, ago=600.0)
    watch = RunWatch(open_run(lively.path))
    found = {r.rank: (r.state, r.why) for r in watch.look().ranks}
    assert found == {0: ("up", ""), 1: ("starting", "")}
    beat(lively, 0, 1, ago=600.0)
    assert watch.look().ranks[0].state == "late"
    watch.close()


@pytest.mark.parametrize("how", ["closed", "SIGKILL", "nobody saw it"])
def test_of_an_ended_run_without_heartbeats_it_says_how_the_ranks_ended(tmp_path, how):
    made = Made(tmp_path / "run", segment_frames=512).whole(5)
    told = {"event": "exit", "order": -1, "witness": "w", "time_ns": 1}
    if how == "SIGKILL":
        for rank, signal_ in ((0, "SIGTERM"), (1, how)):
            made.tell(framing.LIFE, {**told, "rank": rank, "how": signal_})
    made.tell(framing.LIFE, {"event": "finished"})
    made.close(cleanly=how == "closed")
    watch = RunWatch(open_run(made.path))
    now = watch.look()
    watch.close()
    ended = {r.rank: (r.state, r.why, r.step) for r in now.ranks}
    whole = {
        "closed": {0: ("closed", "", 4), 1: ("closed", "", 4)},
        "SIGKILL": {0: ("dead", "SIGTERM", 4), 1: ("dead", "SIGKILL", 4)},
        "nobody saw it": {0: ("dead", "no last word", 4), 1: ("dead", "no last word", 4)},
    }
    assert ended == whole[how]
    assert "no step yet" not in text(now)


def test_the_gradient_norm_stays_that_of_the_last_sampled_step_when_the_last_losses_come(lively):
    losses = {rank: {"loss": 0.5} for rank in (0, 1)}
    last = record(0, 7, n=0, ranks=(0, 1), sampled=False, scalars=losses)
    lively.tell(framing.RECORD, last)
    watch = RunWatch(open_run(lively.path))
    beat_of_all(lively, "forward", "backward")
    told = {r.rank: (r.loss, r.grad_norm) for r in watch.look().ranks}
    assert told == {0: (0.5, 1.0), 1: (0.5, 2.0)}
    watch.close()


def test_memory_of_a_process_that_is_gone_is_not_known(lively):
    ranks = {"0": {"resident_bytes": 0.0, "cpu_seconds": 3.0}}
    lively.tell(framing.SAMPLE, {"time_ns": 1, "host": {}, "ranks": ranks})
    watch = RunWatch(open_run(lively.path))
    beat_of_all(lively, "forward", "backward")
    assert [r.resident_bytes for r in watch.look().ranks] == [None, None]
    watch.close()


def test_without_a_daemon_it_says_what_is_not_known(tmp_path):
    made = Made(tmp_path / "run").whole(3, told=False)
    beat(made, 0, 3)
    watch = RunWatch(open_run(made.path))
    assert NO_DAEMON in text(watch.look())
    watch.close()
    made.close()
    watch = RunWatch(open_run(made.path))
    now = watch.look()
    assert text(now).endswith("modules are not known\n\nanomalies are not known")
    assert {r.pages for r in now.ranks} == {None}
    watch.close()
    made.close()


def test_a_stranger_s_run_makes_it_read_nothing_else_and_wait_for_nobody(tmp_path):
    made = Made(tmp_path / "run").whole(2)
    beat(made, 0, 2)
    made.close()
    secret = tmp_path / "outside"
    secret.mkdir()
    shutil.copy(made.run.heartbeat(0, NODE, 0), secret / "rank_00007")
    (made.path / "heartbeat/000/node_0001").symlink_to(secret)
    os.mkfifo(made.run.heartbeat(0, NODE, 1))
    os.mkfifo(made.run.daemon_journal(0, NODE) / "00000009.wal")
    os.mkfifo(made.run.rank_journal(0, NODE, 0) / "00000000.wal.")
    daemon = JournalWriter(made.run.daemon_journal(0, "node_0002"), {})
    for value in ({"host": [], "time_ns": "x"}, {"event": "death", "rank": {}}):
        daemon.append_json(framing.SAMPLE, value)
        daemon.append_json(framing.LIFE, value)
    daemon.append(framing.RECORD, b"?")
    daemon.append(framing.ANOMALY, b"[]")
    daemon.close()
    watch = RunWatch(open_run(made.path))
    assert [r.rank for r in watch.look().ranks] == [0, 1]
    assert watch.look().sampled_step == 1
    watch.close()


# ---- the metrics of a daemon

VIEW = NodeView(
    time_ns=10**18, run_id="gpt", directory="/runs/gpt", attempt=0, node=NODE, world_size=4,
    torch="2", backend="gloo", is_head=True, detectors=tuple(TITLES),
    ranks=(
        RankView(0, 0, 11, "cuda:0", up=True, last_heartbeat_ns=10**18 - 10**9, steps=40,
                 phase_seconds={"forward": 5.0, "backward": 15.0}, loss=2.5, grad_norm=math.nan,
                 resident_bytes=2**30, cpu_seconds=50.0, anomalies={"page": 1}),
        RankView(1, 1, 12, "cuda:1", up=False, last_heartbeat_ns=10**18 - 9 * 10**9, steps=39),
    ),
    first_failure=FirstFailure(1, "SIGKILL", 10**18),
    merged=merge_all([record(0, 5), record(1, 5)]),
    anomalies={("nonfinite", "page"): 1}, exemplars={("nonfinite", "page"): ANOMALY},
    host={"cpu_ratio": 0.25},
)  # fmt: skip
URL = "http://127.0.0.1:13377"


def test_a_daemon_s_rank_is_late_by_what_its_steps_took_and_never_before_the_first():
    still = {"last_heartbeat_ns": VIEW.time_ns - 300 * 10**9}
    for changes, state in (
        ({"steps": 0, "phase_seconds": {"forward": 5.0}}, "up"),
        ({"steps": 40}, "late"),
        ({"steps": 2, "phase_seconds": {"forward": 100.0}}, "up"),
    ):
        view = replace(VIEW, ranks=(replace(VIEW.ranks[0], **still, **changes),))
        watch = UrlWatch(URL, lambda _, view=view: served(view))
        assert [watch.look().ranks[0].state for _ in range(2)] == [state] * 2
        later = replace(view, time_ns=view.time_ns + 10**9)
        watch._fetch = lambda _, later=later: served(later)
        assert watch.look().ranks[0].state == state  # nor because it has no pace any more


def served(view: NodeView, *, openmetrics: bool = True) -> tuple[bytes, str]:
    kind = OPENMETRICS_CONTENT_TYPE if openmetrics else TEXT_CONTENT_TYPE
    return render(view, openmetrics), kind


@pytest.mark.parametrize("openmetrics", [True, False])
def test_a_daemon_says_the_same_as_its_run(openmetrics):
    now = UrlWatch(URL, lambda _: served(VIEW, openmetrics=openmetrics)).look()
    assert (now.name, now.state, now.world_size) == ("gpt", "running", 4)
    assert now.notes == ("2 of 4 ranks: those of this node",)
    dead, up = now.ranks
    assert (dead.rank, dead.state, dead.why, dead.seen) == (1, "dead", "SIGKILL", 9.0)
    assert (up.step, up.rate, up.phase, up.loss) == (40, 2.0, ("backward", 0.75), 2.5)
    assert (up.state, up.device, up.pages, up.resident_bytes) == ("up", "cuda:0", 1, 2**30)
    assert math.isnan(up.grad_norm)
    assert {s.site for s in now.sites} == {f"blocks.{i}.mlp:output" for i in range(3)}
    (page,) = now.anomalies
    latest = ", the latest at step 3, rank 0, fqn blocks.1.mlp, kind output"
    assert page == "PAGE nonfinite: 1" + (latest if openmetrics else "")
    assert now.host == {"cpu_ratio": 0.25}


def test_a_daemon_none_of_whose_sites_is_finite_does_not_look_like_one_without_a_sample():
    nothing = replace(VIEW, merged=None)
    assert "no sampled step yet" in text(UrlWatch(URL, lambda _: served(nothing)).look())
    bad = record(0, 5)
    bad.counts[:, 1] = bad.counts[:, 0]  # all of them NaN
    bad.values[:] = [math.inf, -math.inf, 0.0, 0.0]
    sampled = replace(VIEW.ranks[0], sites_expected=3, sites_observed=3)
    view = replace(VIEW, merged=merge_all([bad]), ranks=(sampled,))
    said = text(UrlWatch(URL, lambda _: served(view)).look())
    assert "no site had a finite value at the newest sampled step" in said


def test_the_site_that_a_daemon_s_first_cause_names_is_shown_though_it_has_no_finite_value():
    bad = record(0, 5)
    bad.counts[1, 1] = bad.counts[1, 0]  # all of it NaN: such a site is not served
    bad.values[1] = [math.inf, -math.inf, 0.0, 0.0]
    cause = FirstCauseEvent(
        detector="nonfinite", step=5, rank=0, module="blocks.1.mlp", kind="output",
        phase="forward", time_ns=1,
    )  # fmt: skip
    view = replace(VIEW, merged=merge_all([bad]), first_cause=cause)
    watch = UrlWatch(URL, lambda _: served(view))
    first, *rest = watch.look().sites
    assert (first.site, first.guilty) == ("blocks.1.mlp:output", True)
    assert math.isnan(first.abs_max)
    assert {s.site for s in rest} == {"blocks.0.mlp:output", "blocks.2.mlp:output"}
    assert [s.growth for s in rest] == [None, None]
    assert [s.growth for s in watch.look().sites[1:]] == [1.0, 1.0]


def test_a_daemon_that_went_away_comes_back():
    answers: list[object] = [served(VIEW), OSError("refused"), b"", served(
        replace(VIEW, time_ns=VIEW.time_ns + 5 * 10**9, finished=True,
                ranks=(replace(VIEW.ranks[0], steps=50, cpu_seconds=60.0, phase_seconds={
                    "forward": 9.0, "backward": 16.0}),)))]  # fmt: skip

    def answer(_: str) -> tuple[bytes, str]:
        given = answers.pop(0)
        if isinstance(given, OSError):
            raise given
        return given if isinstance(given, tuple) else (given, "text/plain")

    watch = UrlWatch(URL, answer)
    first = watch.look()
    away, other, back = watch.look(), watch.look(), watch.look()
    assert away == replace(first, state="unreachable: refused")
    assert other == replace(first, state="unreachable: these are no metrics of ddpprobe")
    (rank,) = back.ranks
    assert (back.state, rank.rate, rank.cpus, rank.phase) == ("ended", 2.0, 2.0, ("forward", 0.8))


@contextlib.contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_no_daemon_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not for daemons
    with answering(b"{}") as url:
        assert main(["top", url, "--once"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with answering(b"", 503) as url, pytest.raises(NoMetricsError, match="answers 503"):
        fetch(url)
    for odd in (b"ddpprobe_build_info 1\nddpprobe_job_info 1\n",
                b'ddpprobe_build_info 1\nddpprobe_steps_total{rank="0"} +Inf\n'):  # fmt: skip
        says = UrlWatch(URL, lambda _, odd=odd: (odd, "text/plain")).look().state
        assert says.startswith("unreachable: its metrics make no sense")
    with answering(b'ddpprobe_x{a="') as url:
        assert UrlWatch(url).look().state.startswith("unreachable: this is no exposition")
    assert main(["top", "http://127.0.0.1:1", "--json"]) == 2
    assert "unreachable" in capsys.readouterr().err
    for bad in ("file:///etc/passwd", "ftp://x", "http://"):
        assert main(["top", bad]) == 2
        assert "expected http://HOST:PORT" in capsys.readouterr().err
    assert target("http://h:1") == "http://h:1/metrics"
    assert target("https://h/x?y=1#z") == "https://h/x?y=1"


# ---- the verb


def test_without_a_run_the_newest_one_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2
    assert "no run below ddpprobe-runs" in capsys.readouterr().err
    for age, name in enumerate(("new", "old")):
        file = Made(tmp_path / "ddpprobe-runs" / name).whole(2).close().run_json
        paths.write_json(file, {**json.loads(file.read_bytes()), "created_ns": 10**18 - age})
    assert main(["top"]) == 0
    assert "ddpprobe-runs/new" in capsys.readouterr().out
    assert main(["top", "ddpprobe-runs/old", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format_version"] == 1
    assert told["source"] == "ddpprobe-runs/old"
    assert [r["state"] for r in told["ranks"]] == ["closed"] * 2


class Terminal:
    """`ddpprobe top` on a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: object) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        code = "import sys; from ddpprobe.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "top", *map(str, words)]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may cut a character

    def until(self, says: str, seconds: float = 30.0) -> None:
        """Read until what is drawn from now on holds a text."""
        start, late = len(self.seen), deadline(seconds)
        while says not in self.seen[start:]:
            assert time.monotonic() < late, f"no {says!r} in {self.seen[start:]}"
            self.read(0.2)

    def read(self, seconds: float) -> bool:
        with contextlib.suppress(OSError):  # EIO: the other side is gone
            if select.select([self._ours], [], [], seconds)[0]:
                data = os.read(self._ours, 1 << 16)
                self.seen += self._decoder.decode(data)
                return bool(data)
        return False

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        """Read what is left, and return the exit code."""
        while self.process.poll() is None or self.read(0.0):
            self.read(0.1)
        return self.process.wait(20 * PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_a_run_is_watched_to_its_end_from_its_directory_and_from_its_daemon(tmp_path):
    with harness(tmp_path) as real, contextlib.ExitStack() as stack:
        paths.write_json(real.run.run_json, {"format_version": 1, "run_id": "x", "name": "test"})
        lock = DirectoryLock(real.run.lock)
        assert lock.acquire()
        daemon = real.daemon()
        ranks = [real.rank(r, steps=40, delay=0.05, bad=9 if r else None) for r in (0, 1)]
        wait(lambda: real.said() and real.metrics())
        listen = f"http://{real.said()['listen']}"
        tops = [Terminal(real.run.path), Terminal(listen)]
        for top in tops:
            stack.callback(top.close)
            top.until("2 ranks")
            top.until("nonfinite")
        assert tops[0].seen.startswith("\x1b[?1049h")  # a screen of its own
        assert [rank.wait(30 * PATIENCE) for rank in ranks] == [0, 0]
        lock.release()
        daemon.wait(30 * PATIENCE)
        tops[0].until("ended")
        tops[1].until("unreachable")
        tops[0].press(b"q")
        tops[1].process.send_signal(signal.SIGINT)
        assert [top.end() for top in tops] == [0, 0]
    for top, state in zip(tops, ("ended", "unreachable"), strict=True):
        left = top.seen.split("\x1b[?1049l")[-1].split("\r\n")
        assert state in left[0]
        assert len(left) <= 25
        assert max(map(len, left)) <= 80
        assert any("PAGE" in line and "nonfinite" in line for line in left)
