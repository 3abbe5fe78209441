"""A node with the right secret that is broken, or lies, can do so about its own ranks only."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.daemon import admission, blocks, gather_queue
from ddpprobe.daemon.blocks import Refusal
from ddpprobe.daemon.push import Pusher
from ddpprobe.daemon.server import Server
from ddpprobe.rank import head, join
from ddpprobe.records.events import Told, to_json
from ddpprobe.records.fate import Fate, Progress, RaisedError, Reason
from ddpprobe.records.gather import Gather
from ddpprobe.records.node_view import FirstFailure
from ddpprobe.records.step import UNORDERED, Site, StepRecord
from ddpprobe.rundir import framing, orders
from ddpprobe.rundir.roster import Roster, Shared, digest, new_secret

from ..made_cluster import Cluster, block, cluster, wish
from ..made_runs import bad, head_merge, key, record
from ..waiting import deadline


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Cluster]:
    """Ranks 0 and 1 on the head's node, 2 and 3 on node 1, 4 and 5 on node 2."""
    with cluster(tmp_path, nodes=3) as made:
        yield made


def go_on(job: Cluster, first: int, last: int, honest: tuple[int, ...] = (1, 2)) -> None:
    """Train the steps [first, last), and let the honest nodes push them."""
    for step in range(first, last):
        job.train(step)
        for node in honest:
            assert job.push(node, job.said(node, step)) == 204
        job.look(0.1)


def whole(job: Cluster, step: int) -> StepRecord:
    """Return the record of all ranks, added up in the order of the head: bit for bit."""
    own = [record(rank, step) for rank in job.of(0)]
    return head_merge([*own, *(job.said(node, step) for node in range(1, job.nodes))])


def assert_whole(job: Cluster, steps: int) -> None:
    """Every step of all honest nodes came out, exactly."""
    found = job.merged()
    assert [r.step for r in found] == list(range(steps))
    assert [key(r) for r in found] == [key(whole(job, step)) for step in range(steps)]
    assert job.anomalies() == []
    assert job.head.losses() == {}


# ---- whose ranks


FORGED: dict[str, Any] = {
    "the head's rank": {"ranks": (0,)},
    "the head's rank beside its own": {"ranks": (0, 2, 3)},
    "another node's rank": {"ranks": (4,)},
    "a rank beyond the world": {"ranks": (2, 3, 6)},
    "200,000 ranks": {"ranks": tuple(range(200_000))},
    "one rank twice": {"ranks": (2, 2)},
    "ranks in disorder": {"ranks": (3, 2)},
    "no rank": {"ranks": ()},
    "another's first bad tensor": {"first_bad": bad(0, 1)},
    "a first bad tensor of a later step": {"first_bad": replace(bad(2, 1), step=2**62)},
    "elements that cannot be": {"first_bad": replace(bad(2, 1), nan=2**62)},
    "another's loss": {"scalars": {0: {"loss": math.nan}}},
    "another's checksum": {"digests": {("a.weight", ""): {7: 0b1}}},
    "its own absence": {"missing": (2,)},
    "a step of another age": {"step": 2**62},
    "a step that is just too far": {"step": admission.AHEAD_STEPS + 1},
    "a step before the first": {"step": -1},
    "another attempt": {"attempt": 7},
    "an attempt before the first": {"attempt": -1},
    "negative counts": {"counts": np.full((3, 7), -1)},
    "counts that overflow": {"counts": np.full((3, 7), 2**62)},
    "a time before all times": {"wall_time_ns": -1},
    "a kind that does not exist": {"sites": tuple(Site(n, "colour") for n in "abc")},
    "a placement that does not exist": {"sites": tuple(Site(n, "output", "", "x") for n in "abc")},
    "a site that stands twice": {"sites": (Site("a", "output"),) * 3},
    "a name without end": {"sites": tuple(Site(n * 5000, "output") for n in "abc")},
}  # fmt: skip


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_record_is_refused_and_changes_nothing(job, change, caplog) -> None:
    forged = replace(job.said(1, 1), **change)
    job.train(1)
    assert job.push(1, forged, job.said(1, 1)) == 409  # the rest of the block is taken
    assert job.push(2, job.said(2, 1)) == 204
    job.look(0.1)
    go_on(job, 2, 6)
    assert_whole(job, 6)
    assert job.gather_queue.refused.total() == 1
    assert "node_0001: what it pushes is refused" in caplog.text


def test_what_a_node_says_of_the_absence_of_others_is_not_heard(job) -> None:
    job.train(1)
    assert job.push(1, replace(job.said(1, 1), missing=(0, 4, 5, 2**20))) == 204
    job.look(0.1)
    assert len(job.merged()) == 1  # node 2 is still waited for
    assert job.push(2, job.said(2, 1)) == 204
    job.look(0.1)
    assert_whole(job, 2)


def test_refusals_are_told_once_and_counted(job, caplog) -> None:
    for _ in range(50):
        assert job.push(1, replace(job.said(1, 1), ranks=(0,))) == 409
    assert job.gather_queue.refused == {"refused_ranks": 50}
    assert caplog.text.count("what it pushes is refused") == 1


def test_a_real_nan_pages_behind_a_record_of_a_far_step(job) -> None:
    """Records of a far step once made all later ones late."""
    job.push(1, replace(job.said(1, 1), step=2**62))
    job.push(1, job.said(1, 400))  # not absurd, and still no reason to wait for nobody
    job.look(60.0)
    go_on(job, 1, 5, honest=(2,))
    job.train(5, first_bad=None)
    assert job.push(2, replace(job.said(2, 5), first_bad=bad(4, 5))) == 204
    job.look(0.1)
    job.look(60.0)
    (page,) = job.anomalies()
    assert (page.step, page.rank, page.level) == (5, 4, "page")
    assert [r.step for r in job.merged()] == list(range(6))
    assert job.head.losses() == {}


def test_stages_of_two_nodes_whose_order_is_not_known_are_heard_and_neither_is_blamed(job) -> None:
    job.train(2, first_bad=None)
    for node, rank in ((1, 2), (2, 4)):
        stage = replace(bad(rank, 2), order=UNORDERED)
        assert job.push(node, replace(job.said(node, 2), first_bad=stage)) == 204
    job.look(0.1)
    job.look(60.0)
    (page,) = job.anomalies()
    assert (page.step, page.rank, page.module, page.level) == (2, None, None, "page")
    assert job.head.losses() == {}


def test_a_node_that_is_ahead_is_heard_when_the_head_is_there(job) -> None:
    """Local SGD: node 1 takes 60 steps between two meetings, ahead of the head."""
    for step in range(1, 60):
        assert job.push(1, job.said(1, step)) == 204
        job.look(1.0)
    assert len(job.merged()) == 1
    go_on(job, 1, 60, honest=(2,))
    assert_whole(job, 60)


def test_most_of_the_nodes_go_on_without_ranks_of_the_head_that_hang(tmp_path) -> None:
    with cluster(tmp_path, nodes=4) as job:
        assert job.push(1, job.said(1, 50)) == 204
        job.look(60.0)
        assert len(job.merged()) == 1  # one alone moves nobody
        for step in range(1, 5):
            for node in (2, 3):
                assert job.push(node, job.said(node, step)) == 204
        job.look(0.1)
        job.look(60.0)
        found = {r.step: r.ranks for r in job.merged()}
        assert found == {0: tuple(range(8)), **dict.fromkeys(range(1, 5), (4, 5, 6, 7))}


def test_the_end_of_the_head_s_ranks_lets_the_others_finish(job) -> None:
    for step in (1, 2, 3):
        assert job.push(1, job.said(1, step)) == 204
        assert job.push(2, job.said(2, step)) == 204
    for rank in job.of(0):
        job.writer(rank).append_json(framing.LIFE, {"event": "closed", "status": "ok"})
    for node in (1, 2):
        ended = {"event": "ended", "attempt": 0, "ranks": list(job.of(node))}
        assert job.push(node, ended) == 204
    job.look(0.1)
    assert {r.step: r.ranks for r in job.merged()} == {
        0: (0, 1, 2, 3, 4, 5), **dict.fromkeys((1, 2, 3), (2, 3, 4, 5)),
    }  # fmt: skip
    assert job.head.gather.waiting_for == frozenset()


def test_the_head_knows_which_nodes_there_are_and_when_each_was_heard(job, monkeypatch) -> None:
    clock = itertools.count(3 * 10**18)
    monkeypatch.setattr(gather_queue.time, "time_ns", lambda: next(clock))
    job.gather_queue.open(0, 6, (0, 1), 0)
    assert job.head.nodes_expected == 3
    assert job.head.node_blocks == {"node_0001": 3 * 10**18, "node_0002": 3 * 10**18}  # awaited
    job.gather_queue.horizon(0)
    go_on(job, 1, 2, honest=(1,))
    first = job.head.node_blocks
    assert first["node_0001"] > first["node_0002"] == 3 * 10**18
    go_on(job, 2, 3)
    then = job.head.node_blocks
    assert all(then[node] > first[node] for node in first)
    # Whoever is told to come again is there all the same.
    job.gather_queue._peers["node_0002"].spent = 1e9
    assert job.push(2, job.said(2, 3)) == 503
    assert job.head.node_blocks["node_0002"] > then["node_0002"]
    assert job.push(1, {"event": "ended", "attempt": 0, "ranks": [2, 3]}) == 204
    assert job.push(1) == 204  # its last words
    assert list(job.head.node_blocks) == ["node_0002"]
    job.gather_queue.discard()
    assert list(job.head.node_blocks) == ["node_0002"]  # it has not said good-bye
    assert job.push(2, {"event": "ended", "attempt": 0, "ranks": [4, 5]}) == 409
    assert job.head.node_blocks == {}


def test_without_a_roster_the_nodes_are_taken_to_be_alike_and_heard_when_they_speak(
    tmp_path,
) -> None:
    with cluster(tmp_path, nodes=3, rostered=False) as job:
        job.gather_queue.open(0, 6, (0, 1), 0)
        job.gather_queue.horizon(0)
        assert (job.head.nodes_expected, job.head.node_blocks) == (3, {})
        assert job.push(1, job.said(1, 1)) == 204
        assert list(job.head.node_blocks) == ["node_0001"]


def test_ended_is_said_of_a_node_s_own_ranks_only(job) -> None:
    for ranks in ([0], [4, 5], [2, 9], [2, 2], [], [-1]):
        assert job.push(1, {"event": "ended", "attempt": 0, "ranks": ranks}) == 409
    job.look()
    assert job.head.gather.waiting_for == frozenset(range(6))


DIED = Fate(
    3, "node_0001", "SIGKILL", order=0, witness="node_0001/7/1.5", time_ns=5, heard=True,
    clock=Progress(12, 0, "forward", 12),
)  # fmt: skip
UNTRUE: dict[str, Any] = {
    "of the head's rank": {"rank": 0},
    "of another node's rank": {"rank": 4},
    "of a rank beyond the world": {"rank": 9},
    "on another node": {"node": "node_0000"},
    "seen by the head itself": {"witness": "node_0000/7/1.5"},
    "with a text without end": {"how": "x" * 5000},
    "by an exception without end": {"error": RaisedError("E", "x" * 5000)},
    "by one that was raised because of one": {"error": RaisedError(cause=Reason("E", "x" * 5000))},
    "by one out of a group of them": {"error": RaisedError(handled=Reason(group="x" * 5000))},
    "by one while it handled one": {"error": RaisedError(behind="x" * 5000)},
    "after all times": {"time_ns": 2**62},
    "in a step of another age": {"clock": Progress(2**62, 0, "data", 0)},
}


def test_the_head_names_a_rank_that_another_node_saw_die_or_stopped(job) -> None:
    go_on(job, 1, 3)
    suspended = replace(DIED, how="", order=-1, witness="", time_ns=0, suspended=True)
    others = [Fate(n, f"node_{n // 2:04d}", heard=True) for n in (2, 4, 5)]
    for told in (suspended, *others):
        assert job.push(told.rank // 2, to_json(Told(0, told))) == 204
    job.look()
    job.look()
    assert (job.head.state, job.head.ends.end.ranks) == ("hung", (3,))
    assert job.head.ends.stuck == {3: "forward"}
    assert job.push(1, to_json(Told(0, DIED))) == 204
    job.look()
    job.look()
    assert (job.head.state, job.head.ends.end.ranks) == ("crashed", (3,))
    assert job.head.ends.first_failure == FirstFailure(3, "SIGKILL", 5)


@pytest.mark.parametrize("change", UNTRUE.values(), ids=UNTRUE)
def test_an_end_that_a_node_cannot_have_seen_is_refused(job, change) -> None:
    go_on(job, 1, 3)
    assert job.push(1, to_json(Told(0, replace(DIED, **change)))) == 409
    job.look()
    job.look()
    assert job.head.state == "running"
    assert job.gather_queue.refused.total() == 1


def test_an_end_in_a_phase_that_does_not_exist_is_no_message(job) -> None:
    said = to_json(Told(0, DIED))
    said["fate"]["clock"]["phase"] = "lunch"
    assert job.push(1, said) == 400


def test_without_a_roster_a_rank_is_of_the_first_node_that_spoke_for_it(tmp_path) -> None:
    with cluster(tmp_path, nodes=3, rostered=False) as job:
        assert job.push(1, job.said(2, 1)) == 409
        assert job.push(1, replace(job.said(1, 1), ranks=(0,))) == 409
        job.train(1)
        assert [job.push(n, job.said(n, 1)) for n in (1, 2)] == [204, 204]
        job.look(0.1)
        assert_whole(job, 2)
        assert job.push(77, job.said(1, 2)) == 409


# ---- blocks and events


@pytest.mark.parametrize(
    ("items", "status"),
    [
        ([{"event": "orders", "attempt": "x", "last": 0}], 400),
        ([{"event": "orders", "attempt": 0, "last": math.inf}], 400),
        ([{"event": "orders", "attempt": 0, "last": 10**400}], 400),
        ([{"event": "orders", "attempt": 0, "last": -(2**62)}], 400),
        ([{"event": "orders", "attempt": 0, "last": 2**62}], 204),
        ([{"event": "ended", "attempt": math.nan, "ranks": [2]}], 400),
        ([{"event": "ended", "attempt": 0, "ranks": [1e400]}], 400),
        ([{"event": "ended", "attempt": 0, "ranks": [True]}], 400),
        ([{"event": "ended", "attempt": 0, "ranks": 2}], 400),
        ([{"event": "ended"}], 400),
        ([{"event": "never heard of"}], 400),
        ([{}], 400),
        ([(framing.LIFE, b"[" * 100_000)], 400),
        ([(framing.LIFE, b'{"event":"ended","attempt":0,"ranks":[' + b"2," * 2**20 + b"2]}")], 400),
        ([(framing.META, b"{}")], 400),
        ([(framing.ANOMALY, b"{}")], 400),
        ([(99, b"")], 400),
        ([(framing.RECORD, b"\xff" * 64)], 400),
        ([(framing.RECORD, b"")], 400),
        ([(framing.SITES, b"[[1]]")], 400),
        ([(framing.SITES, b"7")], 400),
        ([wish(2, cause="request/../../../evil")], 400),
        ([wish(2, cause="trigger/2/../x")], 400),
        ([wish(2, cause="capture:nonfinite")], 400),
        ([wish(2, reason="x" * 5000)], 400),
        ([wish(2, step=math.inf)], 400),
        ([wish(2, step=2**62)], 409),
        ([wish(2, step=-1)], 409),
        ([wish(0)], 409),
        ([{"event": "orders", "attempt": 0, "last": 0}] * (blocks.MAX_FRAMES + 1), 413),
    ],
)  # fmt: skip
def test_what_no_node_says_is_refused_with_a_status_that_ends_it(job, items, status) -> None:
    assert job.push(1, *items) == status
    go_on(job, 1, 3)
    assert_whole(job, 3)
    assert not list(job.path.rglob("*.answer"))


def test_3000_wishes_make_few_files_and_leave_captures_for_the_others(job) -> None:
    before = job.files()
    refused = 0
    for number in range(3000):
        refused += job.push(1, wish(2 + number % 2, number, number)) == 409
        if number % 100 == 0:
            job.look(0.1)
    assert refused == 3000 - admission.MAX_WISH_STEPS
    assert job.push(2, wish(4, 0, 5)) == 204
    job.look(0.1)
    go_on(job, 1, 3)
    assert job.files() - before < 10
    captures = [o.cause for o in job.head._board.orders.values() if o.action == "capture"]
    assert len([c for c in captures if not c.startswith("trigger/4")]) <= admission.MAX_WISH_STEPS


def test_a_wish_for_a_later_step_does_not_hold_up_the_records_behind_it(job) -> None:
    for step in range(1, 4):
        assert job.push(1, wish(2, step, step + 5)) == 204
        go_on(job, step, step + 1)
    assert_whole(job, 4)


def test_wishes_of_one_block_are_counted_too(job) -> None:
    assert job.push(1, *(wish(2, number, number) for number in range(3000))) == 409
    assert job.gather_queue.refused == {"refused_wish": 3000 - admission.MAX_WISH_STEPS}


def test_attempts_that_are_not_under_way_leave_no_directory(job) -> None:
    for attempt in range(1, 300):
        assert job.push(1, replace(job.said(1, 1), attempt=attempt)) == 409
    assert [path.name for path in job.gather_queue.directory.iterdir()] in ([], ["000"])


def test_a_node_names_only_so_many_sites(job, monkeypatch) -> None:
    monkeypatch.setattr(admission, "MAX_SITES", 20)
    for step in range(1, 20):
        job.train(step)
        names = tuple(Site(f"{step}.{i}", "output") for i in range(3))
        status = job.push(1, replace(job.said(1, step), sites=names))
        assert status == (204 if step < 6 else 409)
        assert job.push(2, job.said(2, step)) == 204
    job.look(0.1)
    assert len({s.key for r in job.merged() for s in r.sites}) <= 20


# ---- who waits, and for how long


def test_before_the_head_s_ranks_have_begun_a_node_is_told_to_come_again(tmp_path) -> None:
    job = Cluster(tmp_path / "run")
    try:
        assert job.push(1, job.said(1, 0)) == 503
        job.train(0)
        job.look()
        assert job.push(1, job.said(1, 0)) == 204
    finally:
        job.end()


def test_an_attempt_that_is_about_to_begin_is_told_to_come_again(job) -> None:
    later = replace(job.said(1, 1), attempt=1)
    assert job.push(1, later) == 409
    job.gather_queue.roster = replace(
        job.gather_queue.roster, attempt=1
    )  # rank 0 has written the next one
    assert job.push(1, later) == 503


def test_one_node_fills_its_own_queue_only_and_the_disk_is_bounded(job, monkeypatch) -> None:
    monkeypatch.setattr(gather_queue, "WAITING_BYTES", 50_000)
    statuses = [job.push(1, job.said(1, step)) for step in range(1, 500)]
    assert set(statuses) == {204, 503}
    assert statuses == sorted(statuses)
    held = sum(path.stat().st_size for path in job.gather_queue.directory.rglob("*.block"))
    assert held < 52_000
    taken = statuses.count(204)
    go_on(job, 1, 1 + taken, honest=(2,))
    assert_whole(job, 1 + taken)
    assert job.push(1, job.said(1, 1 + taken)) == 204


@pytest.mark.parametrize("bound", ["ALL_BYTES", "ALL_FILES"])
def test_who_holds_all_secrets_fills_no_disk_and_stops_no_honest_node(
    job, monkeypatch, bound
) -> None:
    monkeypatch.setattr(gather_queue, bound, 50_000 if bound == "ALL_BYTES" else 20)
    statuses = [job.push(1, job.said(1, step)) for step in range(1, 500)]
    assert statuses == sorted(statuses)
    files = list(job.gather_queue.directory.rglob("*.block"))
    most = max(path.stat().st_size for path in files)
    assert sum(path.stat().st_size for path in files) < 50_000 + most
    assert len(files) == statuses.count(204)
    assert len(files) <= 20 or bound == "ALL_BYTES"
    taken = statuses.count(204)
    go_on(job, 1, 1 + taken, honest=(2,))  # who has nothing waiting is let in
    assert_whole(job, 1 + taken)
    assert job.push(1, job.said(1, 1 + taken)) == 204


def test_old_steps_over_and_over_take_no_disk(job) -> None:
    go_on(job, 1, 4)
    for _ in range(100):
        assert job.push(1, job.said(1, 2)) == 204
    assert not list(job.gather_queue.directory.rglob("*.block"))
    job.look(0.1)
    assert job.head.losses() == {"late": 100}


def test_a_node_that_takes_all_the_head_s_time_is_told_to_come_again(job, monkeypatch) -> None:
    monkeypatch.setattr(gather_queue, "CREDIT_SECONDS", 0.0)
    monkeypatch.setattr(gather_queue, "CREDIT_RATE", 0.0)
    assert job.push(1, job.said(1, 1)) == 503  # it has pushed step 0
    monkeypatch.undo()
    assert job.push(1, job.said(1, 1)) == 204


def test_what_was_acknowledged_outlives_a_killed_head_and_is_bound_again(job) -> None:
    job.train(1)
    for node in (1, 2):
        assert job.push(node, job.said(node, 1), wish(2 * node)) == 204
    assert job.push(1, job.said(1, 2)) == 204
    foreign = job.gather_queue.directory / "000" / "node_0001" / "00000099.block"
    foreign.write_bytes(block(job.said(2, 2)))
    foreign.with_name("00000100.block").write_bytes(block(job.said(1, 3))[:-7])
    job.kill()
    job.start()
    job.look()
    job.train(2)
    assert job.push(2, job.said(2, 2)) == 204
    job.look(0.1)
    go_on(job, 3, 5)
    found = {r.step: key(r) for r in job.merged()}
    assert found == {step: key(whole(job, step)) for step in range(5)}


def test_what_lies_here_of_an_earlier_attempt_is_deleted(job) -> None:
    old = job.gather_queue.directory / "000" / "node_0001"
    job.train(1)
    assert job.push(1, job.said(1, 1)) == 204
    assert list(old.iterdir())
    job.gather_queue.open(1, 6, (0, 1))
    assert not old.exists()


def test_a_disk_that_refuses_the_inbox_costs_no_record(job, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gather_queue.paths, "replace_file", refuse)
    go_on(job, 1, 4)
    assert_whole(job, 4)


def test_orders_are_answered_behind_the_number_asked_for(job) -> None:
    job.gather_queue.announce([orders.Order(n, "capture", 10, 12, ("a",)) for n in range(3)])
    ask = {"event": "orders", "attempt": 0, "last": 0}
    answer = job.gather_queue.take("node_0001", block(ask, ask, {**ask, "last": 1}))
    assert [order.number for order in orders.decode_all(answer)] == [2]
    assert job.push(1, {**ask, "attempt": 3}) == 204


# ---- the gather


def test_a_part_that_cannot_be_merged_is_set_aside_alone(caplog) -> None:
    gather = Gather((0, 1, 2))
    gather.add(record(0, 3), 0.0)
    gather.add(replace(record(1, 3), attempt=9), 0.0, final=True)
    gather.add(replace(record(2, 3), ranks=(2, 2)), 0.0, final=True)
    gather.add(record(2, 3), 0.0, final=True)
    (found,) = gather.ready(9.0)
    assert (found.ranks, found.missing, gather.set_aside) == ((0, 2), (1,), 2)
    assert "a part of step 3 cannot be merged" in caplog.text
    assert (gather.pending, gather.ready(99.0)) == (0, [])


def test_a_step_that_the_detectors_cannot_judge_is_set_aside_alone(job, monkeypatch) -> None:
    daemon_journal = job.head.daemon_journal
    update = daemon_journal._detectors.update

    def failing(made: StepRecord) -> object:
        if made.step == 2:
            raise ZeroDivisionError
        return update(made)

    monkeypatch.setattr(daemon_journal._detectors, "update", failing)
    monkeypatch.setattr(job.head._judging, "_strict", False)
    go_on(job, 1, 5)
    assert [r.step for r in job.merged()] == list(range(5))
    assert job.head.losses() == {"set_aside": 1}


# ---- secrets


def test_a_secret_opens_for_its_own_node_only_and_the_roster_holds_none(tmp_path) -> None:
    secrets = {f"node_{n:04d}": new_secret() for n in (1, 2)}
    ranks = {"node_0001": frozenset({2, 3}), "node_0002": frozenset({4, 5})}
    Roster(3, ranks, {n: digest(s) for n, s in secrets.items()}).write(tmp_path / "roster")
    found = Roster.read(tmp_path / "roster")
    assert found is not None
    assert (found.attempt, found.ranks) == (3, ranks)
    assert all(found.admits(node, secret) for node, secret in secrets.items())
    one, two = secrets.values()
    assert not found.admits("node_0001", two)
    assert not found.admits("node_0000", one)
    assert not found.admits("node_0001", digest(one))  # what everybody may know
    assert one not in (tmp_path / "roster").read_text()
    assert (tmp_path / "roster").stat().st_mode & 0o077 == 0


def test_a_damaged_roster_admits_nobody_and_none_is_none(tmp_path, caplog) -> None:
    assert Roster.read(tmp_path / "roster") is None
    for content in ("", "{", "[]", '{"attempt": 1e999, "nodes": {}}', '{"attempt": 0}'):
        (tmp_path / "roster").write_text(content)
        found = Roster.read(tmp_path / "roster")
        assert found is not None
        assert not found.admits("node_0001", "")
    assert "restart the job" in caplog.text


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a token"):
        Shared("")
    assert Shared("x").admits("node_0001", "x")
    assert not Shared("x").admits("", "x")
    assert not Shared("x").admits("node_0001", "y")


# ---- the pusher


@contextlib.contextmanager
def pushing(answers: Callable[[str, bytes], bytes], tmp_path: Path) -> Iterator[Pusher]:
    """Give a pusher of node 1 to a head that answers so."""
    serving = Server("127.0.0.1:0")
    address = serving.start()
    serving.set_gather_handler(answers, Shared("x"))
    pusher = Pusher(f"http://{address}", lambda: "x", "node_0001")
    try:
        yield pusher
    finally:
        pusher.close(5.0)
        serving.stop()


def until(condition: Callable[[], bool]) -> None:
    late = deadline(20)
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.01)


def test_what_a_node_pushes_is_dropped_where_the_head_refuses_it_and_the_rest_arrives(
    job, tmp_path, caplog
) -> None:
    job.train(1)
    with pushing(job.gather_queue.take, tmp_path) as pusher:
        pusher.push(job.said(2, 1))  # a node that is broken
        pusher.push(job.said(1, 1))
        pusher.push(job.said(2, 2))
        until(lambda: pusher.pending == 0)
        pusher.push(replace(job.said(1, 2), attempt=99))
        until(lambda: pusher.pending == 0)
        assert pusher.acknowledged == (99, 2)
        assert pusher.dropped == {"push_refused": 3}
    assert job.push(2, job.said(2, 1)) == 204
    job.look(0.1)
    assert_whole(job, 2)
    told = [r.getMessage() for r in caplog.records if "refuses what this node pushes" in r.msg]
    assert len(told) == 1
    assert "ranks that are not its own" in told[0]


@pytest.mark.parametrize(
    ("status", "reason", "dropped"),
    [(400, "no", 2), (413, "\x1b[31m" * 500, 2), (409, "no JSON", 2), (409, "[]", 2),
     (409, '{"refused": 1e999, "reason": 1}', 2), (409, '{"refused": -5, "reason": "\\n"}', 0),
     (409, '{"refused": 1, "reason": "\\u001b[31m"}', 1)],
)  # fmt: skip
def test_a_refusal_of_any_form_ends_the_sending_and_is_one_plain_line(
    job, tmp_path, caplog, status, reason, dropped
) -> None:
    arrived = threading.Event()

    def answer(_: str, body: bytes) -> bytes:
        arrived.wait(20)
        raise Refusal(status, reason)

    with pushing(answer, tmp_path) as pusher:
        with pusher._changed:  # both go in one block
            pusher.push(job.said(1, 1))
            pusher.push(job.said(1, 2))
        arrived.set()
        until(lambda: pusher.pending == 0)
        assert pusher.dropped["push_refused"] == dropped
    (told,) = [r.getMessage() for r in caplog.records if "refuses what this node pushes" in r.msg]
    assert told.isprintable()
    assert len(told) < 500


def test_a_node_that_is_told_to_come_again_keeps_everything(job, tmp_path) -> None:
    told: list[int] = []

    def answer(node: str, body: bytes) -> bytes:
        told.append(1)
        if len(told) < 3:
            raise Refusal(503, "later")
        return job.gather_queue.take(node, body)

    job.train(1)
    with pushing(answer, tmp_path) as pusher:
        pusher.push(job.said(1, 1))
        until(lambda: pusher.pending == 0)
        assert not pusher.dropped
    assert job.push(2, job.said(2, 1)) == 204
    job.look(0.1)
    assert_whole(job, 2)


def test_a_backlog_of_small_records_fits_into_blocks_that_the_head_takes(job, tmp_path) -> None:
    taken: list[int] = []

    def answer(node: str, body: bytes) -> bytes:
        taken.append(len(blocks.decode(body)))
        return b""

    alarm = StepRecord(0, 1, (2,), 0, sampled=False, first_bad=bad(2, 1))
    with pushing(answer, tmp_path) as pusher:
        with pusher._changed:
            for step in range(9000):
                pusher.push(replace(alarm, step=step))
        until(lambda: pusher.pending == 0)
        assert not pusher.dropped
    assert sum(taken) == 9000
    assert len(taken) > 2


# ---- everything at once


def garbage(rng: random.Random, job: Cluster, node: int, step: int) -> bytes:
    """Return one hostile push."""
    forged = replace(job.said(node, step), **rng.choice(list(FORGED.values())))
    data = bytearray(block(forged))
    match rng.randrange(5):
        case 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            data = bytearray(rng.randbytes(rng.randrange(200)))
        case 3:
            events = ("ended", "trigger", "orders", "told", "closed", "")
            absurd = (0, -1, 2**62, 10**400, 1e308, "x", None, [], {}, True, -5)
            event = {"event": rng.choice(events), "cause": f"trigger/{rng.randrange(200)}/1"}
            for name in ("attempt", "ranks", "last", "step", "reason", "fate"):
                event[name] = rng.choice(absurd)
            data = bytearray(block(event))
    return bytes(data)


def test_64_pushers_one_of_them_hostile_are_merged_exactly(tmp_path) -> None:
    rng = random.Random(64)
    evil, steps = 17, 12
    with cluster(tmp_path, nodes=65, ranks=1) as job:
        for step in range(1, steps):
            job.train(step)
            honest = [n for n in range(1, 65) if n != evil]
            rng.shuffle(honest)
            for node in honest:
                if rng.random() < 0.5:
                    assert job.push_block(evil, garbage(rng, job, evil, step)) in (
                        204, 400, 409, 413, 503,
                    )  # fmt: skip
                assert job.push(node, job.said(node, step)) == 204
            job.look(0.1)
        job.look(60.0)
        found = job.merged()
        others = [rank for rank in range(65) if rank != evil]
        assert [r.step for r in found] == list(range(steps))
        for made in found[1:]:
            assert set(others) <= set(made.ranks)
            if evil in made.ranks:  # it said something true by chance
                continue
            expected = head_merge([record(rank, made.step) for rank in others])
            assert key(replace(made, missing=())) == key(expected)
        assert job.anomalies() == []
        assert job.gather_queue.refused.total() > 50


@st.composite
def hostile_items(draw: st.DrawFn) -> list[Any]:
    """Items of a block as node 1 might push it: true ones, each with something changed."""
    step = draw(st.integers(0, 12) | st.sampled_from([-1, 2**62, 5000]))
    made = head_merge([record(rank, min(max(step, 0), 12)) for rank in (2, 3)])
    change = draw(st.sampled_from([{}, *FORGED.values()]))
    odd = st.one_of(
        st.integers(-(2**70), 2**70), st.floats(), st.none(), st.booleans(), st.text(max_size=3),
        st.lists(st.integers(-3, 9), max_size=4),
    )  # fmt: skip
    event = {
        "event": draw(st.sampled_from(["ended", "trigger", "orders", "x"])),
        **{name: draw(odd) for name in ("attempt", "step", "last", "ranks")},
        "cause": draw(st.sampled_from(["trigger/2/1", "trigger/0/1", "request/x", "a"])),
        "reason": "why",
    }
    changed = replace(made, **{"step": step, **change})
    if draw(st.booleans()):
        with np.errstate(all="ignore"):
            values = np.array(draw(st.lists(st.floats(), min_size=4, max_size=4)))
        changed = replace(changed, values=np.tile(values, (len(changed.sites), 1)))
    return [changed, event][: draw(st.integers(1, 2))]


@settings(max_examples=30, deadline=None)
@given(
    pushes=st.lists(
        st.tuples(st.lists(hostile_items(), max_size=3), st.integers(0, 400)), max_size=8
    )
)
def test_no_sequence_of_pushes_raises_or_changes_rows_of_other_ranks(
    pushes: list[tuple[list[list[Any]], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any block is taken or refused, and no rank but node 1's own is ever spoken for by it."""
    path = tmp_path_factory.mktemp("pushes")
    with cluster(path, nodes=3, ranks=1) as job:
        job.ranks = 1
        for step in range(1, 6):
            job.train(step)
            for lists, flip in pushes:
                data = bytearray(block(*(item for items in lists for item in items)))
                if flip and flip < len(data):
                    data[flip] ^= 0xFF
                assert job.push_block(1, bytes(data)) in (200, 204, 400, 409, 503)
            assert job.push(2, job.said(2, step)) == 204
            job.look(0.1)
        job.look(60.0)
        for made in job.merged():
            assert {0, 2} <= set(made.ranks) <= {0, 1, 2}
            for rank in (0, 2):
                assert made.scalars[rank] == record(rank, made.step).scalars[rank]


def test_an_answer_in_part_says_how_much_was_refused(job) -> None:
    with pytest.raises(Refusal) as refused:
        job.gather_queue.take("node_0001", block(job.said(1, 1), job.said(2, 1), job.said(2, 2)))
    assert refused.value.status == 409
    told = json.loads(refused.value.reason)
    assert told["refused"] == 2
    assert "not its own: 4, 5" in told["reason"]


def test_the_rendezvous_hears_digests_and_the_roster_leaves_the_head_s_node_out(
    monkeypatch,
) -> None:
    places = []
    for rank, node in enumerate((0, 0, 1, 1, 1, 2)):
        monkeypatch.setenv("GROUP_RANK", str(node))
        places.append(join._Place.here(rank))
    heard = [place.facts() for place in places]
    assert not any(place.secret in json.dumps(heard) for place in places)
    made = head._roster(heard, {0: 0, 1: 2, 2: 5}, 4)
    assert made.ranks == {"node_0001": frozenset({2, 3, 4}), "node_0002": frozenset({5})}
    assert made.attempt == 4
    for rank, place in enumerate(places):
        for node in ("node_0000", "node_0001", "node_0002"):
            assert made.admits(node, place.secret) == ((rank, node) in {
                (2, "node_0001"), (5, "node_0002"),
            })  # fmt: skip
