"""The black box: what it keeps, what it announces, and that it does neither twice nor for ever."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.daemon import capture_policy
from ddpprobe.daemon.capture_policy import (
    LEAD_SECONDS,
    LEAD_SECONDS_OF_NODES,
    LEAD_STEPS,
    MAX_CAPTURES,
    MAX_ORDERS,
    MAX_REASON,
    MAX_TRIGGERS,
    QUIET_STEPS,
    CapturePolicy,
)
from ddpprobe.daemon.daemon_journal import WINDOW_STEPS, DaemonJournal
from ddpprobe.daemon.gather_queue import GatherQueue
from ddpprobe.daemon.requests import Request, RequestFiles
from ddpprobe.daemon.suspects import MAX_MODULES, MAX_NAME_BYTES, bounded, match, suspects
from ddpprobe.records.events import TriggerEvent, to_json
from ddpprobe.records.step import COUNTS, Anomaly, Site, StepRecord
from ddpprobe.rundir import framing, orders, paths
from ddpprobe.rundir.heartbeat import Heartbeat
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.orders import MAX_STEPS, Order, OrderBoard
from ddpprobe.rundir.paths import RunDir

from ..made_cluster import block
from ..made_runs import ANOMALY, record

NAN = replace(ANOMALY, values={"nan": 3.0})
SECONDS_A_STEP = 0.1


def page(step: int, detector: str = "nonfinite", **changes: Any) -> Anomaly:
    return replace(NAN, step=step, detector=detector, **changes)


def beat(step: int) -> Heartbeat:
    """Return the heartbeat of a rank that takes 0.1 s for a step."""
    phases = (0.0, step * SECONDS_A_STEP, 0.0, 0.0)
    time_ns = int(step * SECONDS_A_STEP * 1e9) + 1
    return Heartbeat(time_ns, step, 0, "forward", step, 0, step, phases, 0.0)


class Quiet:
    """Detectors that find nothing by themselves."""

    def update(self, _: StepRecord) -> list[Anomaly]:
        return []

    def finish(self) -> list[Anomaly]:
        return []


class Says(Quiet):
    """Detectors that find these."""

    def __init__(self, found: dict[int, list[Anomaly]]) -> None:
        self.found = found

    def update(self, record: StepRecord) -> list[Anomaly]:
        return self.found.get(record.step, [])


class Head:
    """A head's daemon: what it has on disk, and its black box."""

    def __init__(self, path: Path, detectors: Quiet | None = None, **options: Any) -> None:
        self.run = RunDir(path)
        self.directory = path / "daemon"
        self.daemon_journal = DaemonJournal(
            self.directory, {"role": "daemon"}, detectors or Quiet()
        )
        self.board = OrderBoard(self.run.orders(0, "node_0000"))
        self.request_files = RequestFiles(self.run.requests)
        given = {"on_anomaly": "record", "nodes": 1, **options}
        self.box = CapturePolicy(self.board, self.daemon_journal, self.request_files, **given)

    def merge(self, first: int, last: int, every: int = 1) -> None:
        for step in range(first, last + 1, every):
            self.box.found(self.daemon_journal.take(record(0, step)))

    def act(self, step: int) -> list[Order]:
        return self.box.act([beat(step), beat(max(step - 1, 0))])

    def close(self) -> None:
        self.daemon_journal.close()
        self.board.close()

    def said(self, event: str) -> list[dict[str, Any]]:
        tail = JournalTail(self.directory)
        lives = [frame.json() for frame in tail.poll() if frame.type == framing.LIFE]
        tail.close()
        return [life for life in lives if life["event"] == event]

    def pinned(self) -> list[tuple[int, int]]:
        return [(e["first"], e["last"]) for e in self.said("pinned")]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path)
    yield made
    made.close()


# ---- what a page leads to


def test_a_page_keeps_the_window_before_it_and_has_its_module_captured_ahead_of_all_ranks(
    head,
) -> None:
    head.merge(0, 200, every=2)
    head.box.found([page(200, rank=1)])
    (order,) = head.act(203)
    lead = int(np.ceil(LEAD_SECONDS / SECONDS_A_STEP))
    assert (order.number, order.action, order.start, order.stop) == (
        0, "capture", 203 + lead, 203 + lead + 2,
    )  # fmt: skip
    assert order.modules == ("blocks.1.mlp",)
    assert order.reason == "nonfinite: 3 NaN in blocks.1.mlp"
    assert order.anomaly is not None
    first = 200 - 2 * (WINDOW_STEPS - 1)
    assert head.pinned() == [(first, 200), (order.start, order.stop - 1)]
    assert head.act(204) == []


def test_a_long_verdict_is_cut_where_it_can_be_seen(head) -> None:
    head.merge(0, 200, every=2)
    head.box.found([page(200, rank=1, message="word " * 100)])
    (order,) = head.act(203)
    for reason in (order.reason, *(said["reason"] for said in head.said("pinned"))):
        assert (len(reason), reason[-1]) == (MAX_REASON, "…")


def test_what_is_no_page_leads_to_nothing(head) -> None:
    head.merge(0, 9)
    head.box.found([page(9, level="warn"), page(9, level="info")])
    assert head.act(9) == []
    assert head.pinned() == []


def test_a_lasting_fault_is_captured_once_in_a_while_and_not_for_ever(head) -> None:
    head.merge(0, 9)
    starts = []
    for step in range(10, 40 * QUIET_STEPS, 100):
        head.box.found([page(step)])
        starts += [order.start for order in head.act(step)]
    gaps = np.diff(starts)
    assert len(starts) == MAX_CAPTURES
    assert gaps.min() >= QUIET_STEPS
    refused = head.said("order_dropped")
    assert "nonfinite was captured at step" in refused[0]["reason"]
    assert f"there were {MAX_CAPTURES} captures" in refused[-1]["reason"]


def test_pages_found_together_share_a_capture_and_later_ones_wait_for_its_end(head) -> None:
    head.merge(0, 9)
    head.box.found([page(9), page(9, "desync", module="head.weight", kind="param")])
    (order,) = head.act(9)
    assert order.modules == ("blocks.1.mlp", "head")
    head.box.found([page(10, "grad_spike", module="blocks.0")])
    (second,) = head.act(10)
    assert second.start == order.stop


def test_nobody_is_given_orders_in_a_run_that_is_over_but_the_window_is_kept(head) -> None:
    head.merge(0, 9)
    head.box.found([page(9)])
    assert head.box.act([]) == []
    assert head.board.orders == {}
    assert head.pinned() == [(0, 9)]


def test_on_anomaly_stop_stops_once_behind_the_last_captured_step(tmp_path) -> None:
    head = Head(tmp_path, on_anomaly="stop")
    head.merge(0, 9)
    head.box.found([page(9), page(9, "desync")])
    capture, stop = head.act(9)
    assert (stop.action, stop.start, stop.anomaly) == ("stop", capture.stop - 1, page(9))
    head.box.found([page(900, "grad_spike")])
    (later,) = head.act(900)
    assert later.action == "capture"
    head.close()


def test_on_anomaly_tell_tells_of_every_page_even_of_those_that_are_not_captured(tmp_path) -> None:
    head = Head(tmp_path, on_anomaly="tell")
    head.merge(0, 9)
    head.box.found([page(9), page(10, rank=1)])
    found = head.act(11)
    head.box.found([page(12)])
    found += head.act(13)
    told = [order.anomaly for order in found if order.action == "tell"]
    assert told == [page(9), page(10, rank=1), page(12)]
    assert [order.action for order in found].count("capture") == 1
    head.close()


def test_the_number_of_orders_of_an_attempt_is_bounded(tmp_path) -> None:
    head = Head(tmp_path, on_anomaly="tell")
    head.merge(0, 9)
    head.box.found([page(step) for step in range(2 * MAX_ORDERS)])
    assert len(head.act(9)) == MAX_ORDERS
    assert "orders in this attempt" in head.said("order_dropped")[-1]["reason"]
    head.close()


def test_what_the_disk_refuses_is_announced_later(head, monkeypatch) -> None:
    head.merge(0, 9)
    head.box.found([page(9)])
    head.box.ask(Request(0, "trigger/0/0", "a look"))
    monkeypatch.setattr(orders.os, "pwrite", lambda *_: 1)
    assert head.act(9) == []
    monkeypatch.undo()
    assert [order.reason for order in head.act(30)] == [
        "nonfinite: 3 NaN in blocks.1.mlp", "a look",
    ]  # fmt: skip


# ---- successors


@pytest.mark.parametrize("killed", ["before the verdict", "before the order", "before the event"])
def test_the_successor_of_a_killed_daemon_announces_what_it_had_no_time_for_and_nothing_twice(
    tmp_path, monkeypatch, killed
) -> None:
    found = Says({9: [page(9)]})
    first = Head(tmp_path, found)
    if killed == "before the verdict":
        monkeypatch.setattr(first.daemon_journal, "_write_anomaly", lambda _: None)
        monkeypatch.setattr(first.box, "found", lambda _: None)
    first.merge(0, 20)
    if killed == "before the event":
        monkeypatch.setattr(first.box, "_tell", lambda _: None)
        assert len(first.act(20)) == 1
    first.close()
    second = Head(tmp_path, found)
    announced = second.act(25)
    assert len(announced) == (killed != "before the event")
    assert len(second.board.orders) == 1
    third = Head(tmp_path, found)
    assert third.act(30) == []
    start = third.board.orders[0].start
    assert sorted(third.pinned())[1:] == [(start, start + 1)]
    assert min(third.pinned())[1] == 9
    assert [e["number"] for e in third.said("order")] == [0]
    for each in (second, third):
        each.close()


# ---- how far ahead


@given(st.integers(5, 500), st.floats(1e-4, 30.0), st.sampled_from([1, 8]))
@settings(max_examples=15, deadline=None)
def test_an_order_lies_ahead_by_the_time_it_takes_to_be_heard(step, seconds, nodes) -> None:
    wanted = LEAD_SECONDS if nodes == 1 else LEAD_SECONDS_OF_NODES
    outlook = capture_policy._Outlook(wanted)
    beats = [
        replace(beat(n), phase_seconds=(0.0, n * seconds, 0.0, 0.0), time_ns=int(n * seconds * 1e9))
        for n in range(step - 4, step + 1)
    ]
    for each in beats:
        outlook.note([each])
    ahead = outlook.step([beats[-1]]) - step
    assert ahead >= LEAD_STEPS
    assert ahead * seconds >= wanted * 0.999
    assert ahead <= max(LEAD_STEPS, 1.05 * wanted / seconds + 1)


def test_a_run_that_has_become_quick_is_taken_at_its_speed_of_late() -> None:
    outlook = capture_policy._Outlook(1.0)
    slow = replace(beat(100), phase_seconds=(0.0, 1000.0, 0.0, 0.0))
    for n in range(10):
        outlook.note([replace(slow, step=100 + 10 * n, time_ns=int(1e9 + n * 1e8))])
    assert outlook.step([replace(slow, step=190)]) == pytest.approx(290, abs=2)


# ---- who is under suspicion


def a_record(*rows: tuple[str, str, float, int]) -> StepRecord:
    """Return a record of sites (FQN, kind) with a magnitude and a number of NaN."""
    sites = tuple(Site(fqn, kind) for fqn, kind, *_ in rows)
    counts = np.ones((len(rows), len(COUNTS)), np.int64) * 8
    counts[:, 1:4] = 0
    values = np.zeros((len(rows), 4))
    for i, (_, _, magnitude, nan) in enumerate(rows):
        counts[i, COUNTS.index("nan")] = nan
        values[i, :2] = -magnitude, magnitude
    return StepRecord(0, 5, (0,), 1, sites=sites, counts=counts, values=values)


HEALTHY = a_record(
    ("a", "output", 3.0, 0), ("b.x", "output", 9.0, 0), ("b", "output", 9.0, 0),
    ("b.x.weight", "grad", 99.0, 0), ("", "output", 1.0, 0),
)  # fmt: skip
SICK = a_record(
    ("a", "output", 3.0, 0), ("b.x", "output", 9.0, 2), ("b", "output", 0.0, 2),
    ("b.x.weight", "grad", 0.0, 8), ("c", "output", 0.0, 1), ("", "output", 0.0, 1),
)  # fmt: skip
UNKNOWN = replace(NAN, module=None, kind=None)


@pytest.mark.parametrize(
    ("anomaly", "near", "merged", "found"),
    [
        (NAN, [], SICK, ["blocks.1.mlp"]),
        (replace(NAN, module="b.x.weight", kind="grad"), [], SICK, ["b.x"]),
        (replace(NAN, module="w", kind="param"), [], SICK, [""]),
        (replace(NAN, module="b", kind="grad_output"), [], SICK, ["b"]),
        (UNKNOWN, [UNKNOWN, page(4, module="c"), page(4, module="d")], SICK, ["d", "c"]),
        (UNKNOWN, [UNKNOWN], SICK, ["b.x", "c"]),
        (UNKNOWN, [], HEALTHY, ["b.x", "a"]),
        (None, [], HEALTHY, ["b.x", "a"]),
        (None, [], None, []),
    ],
)
def test_the_guilty_module_is_captured_or_who_stands_nearest(anomaly, near, merged, found) -> None:
    assert suspects(anomaly, near, merged) == found


def test_who_stands_nearest_among_thousands_is_found_without_comparing_each_to_each() -> None:
    """At 5,000 sites that held a daemon up for ten seconds."""

    def calls(sites: int) -> int:
        made, counted = record(0, 3, sites), count()

        def note(_: object, event: str, __: object) -> None:
            if event in {"call", "c_call"}:
                next(counted)

        sys.setprofile(note)
        try:
            suspects(None, [], made)
        finally:
            sys.setprofile(None)
        return next(counted)

    assert calls(400) < 6 * calls(100)


def test_globs_are_over_observed_modules_and_an_order_is_bounded() -> None:
    assert match(["b*", "a"], HEALTHY) == ["a", "b.x", "b"]
    assert match(["*.weight"], HEALTHY) == []
    assert match(["*"], None) == []
    names = [f"layers.{n}" for n in range(2 * MAX_MODULES)]
    assert bounded(["", "", *names]) == ("", *names[: MAX_MODULES - 1])
    assert bounded(["a" * MAX_NAME_BYTES, "b"]) == ("a" * MAX_NAME_BYTES,)
    assert bounded(["\udcff" * MAX_NAME_BYTES]) == ()


# ---- what users ask for


def leave(head: Head, name: str, content: object) -> None:
    paths.make_dir(head.run.requests)
    text = content if isinstance(content, str) else json.dumps(content)
    (head.run.requests / f"{name}.json").write_text(text)


def answer(head: Head, name: str) -> dict[str, Any]:
    assert not (head.run.requests / f"{name}.json").exists()
    return json.loads((head.run.requests / f"{name}.answer").read_text())


def serve(head: Head, step: int) -> list[Order]:
    for request in head.request_files.collect(0):
        head.box.ask(request)
    return head.act(step)


def test_a_request_is_followed_once_answered_and_its_window_kept(head) -> None:
    head.merge(0, 9)
    leave(head, "one", {"modules": ["blocks.[01].*"], "steps": 3, "reason": "a look"})
    (order,) = serve(head, 9)
    assert order.modules == ("blocks.0.mlp", "blocks.1.mlp")
    assert (order.stop - order.start, order.reason) == (3, "trigger: a look")
    told = answer(head, "one")["order"]
    assert (told["start"], told["stop"], told["modules"]) == (
        order.start, order.stop, list(order.modules),
    )  # fmt: skip
    assert head.pinned() == [(order.start, order.stop - 1), (0, 9)]
    successor = Head(head.run.path)
    leave(successor, "one", {"modules": ["*"], "steps": 3, "reason": "a look"})
    assert serve(successor, 30) == []
    assert answer(successor, "one")["order"]["start"] == order.start
    successor.close()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"modules": ["none.*"], "steps": 1, "reason": ""}, "no observed module matches 'none.*'"),
        ({"modules": [], "steps": 0, "reason": ""}, "0 steps were asked for"),
        ({"modules": [], "steps": MAX_STEPS + 1, "reason": ""}, f"1 to {MAX_STEPS}"),
        ({"modules": [], "steps": "many", "reason": ""}, "cannot be read"),
        ({"modules": 3, "steps": 1, "reason": ""}, "cannot be read"),
        ({}, "cannot be read"),
        ("[" * 60000, "cannot be read"),
        ("rubbish", "cannot be read"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_words(head, asked, why) -> None:
    head.merge(0, 9)
    leave(head, "bad", asked)
    assert serve(head, 9) == []
    assert why in answer(head, "bad")["refused"]


def test_a_request_is_no_way_to_read_other_files(head, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"modules": [], "steps": 1, "reason": "the key"}))
    paths.make_dir(head.run.requests)
    (head.run.requests / "link.json").symlink_to(secret)
    head.merge(0, 9)
    assert serve(head, 9) == []
    assert "the key" not in str(answer(head, "link"))
    assert secret.exists()


def test_what_all_ranks_ask_for_at_once_is_one_capture_and_a_script_gets_so_many(head) -> None:
    head.merge(0, 9)
    made = []
    for turn in range(MAX_TRIGGERS + 5):
        step = 10 + 20 * turn
        for rank in range(4):
            asked = TriggerEvent(number=turn, step=step + rank, reason="loss jumped")
            head.box.ask(Request.of_rank(0, rank, asked))
            made += head.act(step + 5)
    assert [order.cause for order in made] == [f"trigger/0/{n}" for n in range(MAX_TRIGGERS)]
    assert {order.reason for order in made} == {"trigger: loss jumped"}
    dropped = [event["reason"] for event in head.said("order_dropped")]
    assert dropped[0] == "it is captured with order 0"
    assert dropped[-1] == f"there were {MAX_TRIGGERS} of them"


def test_a_verdict_that_fits_into_no_order_is_dropped_and_said(head) -> None:
    head.merge(0, 9)
    head.box.found([page(9, values={"x" * orders.MAX_BYTES: 1.0})])
    assert head.act(9) == []
    assert "takes" in head.said("order_dropped")[0]["reason"]


def test_a_page_with_nothing_to_suspect_captures_nothing(head) -> None:
    head.box.found([page(0, module=None)])
    assert head.act(0) == []


def test_a_run_without_a_record_has_nothing_to_capture(head) -> None:
    leave(head, "early", {"modules": [], "steps": 1, "reason": ""})
    assert serve(head, 0) == []
    assert answer(head, "early")["refused"] == "no module was observed yet"


# ---- over nodes


def test_another_node_gets_the_orders_it_does_not_have_and_passes_wishes_on(tmp_path) -> None:
    gather_queue = GatherQueue(tmp_path / "inbox")
    gather_queue.open(1, 8, (0,))
    gather_queue.horizon(5)
    given = [Order(n, "capture", 10, 12, ("a",)) for n in range(3)]
    gather_queue.announce(given[:2])
    gather_queue.announce(given[2:])
    wish = Request(1, "trigger/7/0", "trigger: look", step=3)
    ask = {"event": "orders", "attempt": 1, "last": 0}
    assert (
        orders.decode_all(gather_queue.take("node_0001", block(ask, to_json(wish.wish()))))
        == given[1:]
    )
    assert gather_queue.take("node_0001", block({**ask, "last": 2})) == b""
    assert gather_queue.take("node_0001", block({**ask, "attempt": 0})) == b""
    assert gather_queue.take("node_0001", block(to_json(wish.wish()))) == b""
    assert gather_queue.collect() == [wish]
    again = GatherQueue(tmp_path / "inbox")  # its daemon was killed before it followed the wish
    again.open(1, 8, (0,))
    assert again.collect() == [wish]
