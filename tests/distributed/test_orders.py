"""What the head orders happens on all ranks at the same steps, over nodes and killed daemons."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddpprobe
from ddpprobe.cli import main
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.orders import Order, OrderReader
from ddpprobe.rundir.paths import DirectoryLock, RunDir, node_name, write_json
from ddpprobe.store.reader import StoredGroup

from ..waiting import PATIENCE, daemons_below
from . import daemon_harness
from .daemon_harness import Harness, kill, wait

JOB = Path(__file__).with_name("orders_job.py")


def posted(run: RunDir, node: int = 0) -> list[Order]:
    reader = OrderReader(run.orders(0, node_name(node)))
    found = list(iter(reader.look, None))
    reader.close()
    return found


def events(run: RunDir, node: int, source: str, *names: str) -> list[dict[str, Any]]:
    """Return what somebody said, whether the store has taken it over already or not."""
    group = StoredGroup(run, f"attempt_000/{node_name(node)}")
    said = {seq: e for s, seq, e in group.events() if s == source}
    tail = JournalTail(run.attempt_dir(0) / node_name(node) / source)
    said |= {frame.seq: frame.json() for frame in tail.poll() if frame.type == framing.LIFE}
    tail.close()
    return [said[seq] for seq in sorted(said) if said[seq].get("event") in names]


def test_a_trigger_and_a_nan_are_captured_and_stop_all_ranks_of_all_nodes_at_the_same_step(
    torchrun, tmp_path, poll
) -> None:
    env = {"DDPPROBE_LISTEN": "127.0.0.1:0", "DDPPROBE_LINGER": "0"}
    done = torchrun([JOB, tmp_path], env=env)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    poll(lambda: not daemons_below(tmp_path), 40)
    run = RunDir(tmp_path / "stopped")
    trigger, capture, stop = posted(run)
    assert posted(run, 1) == [trigger, capture, stop], "the garbage on it has hurt the board"
    assert (trigger.reason, trigger.stop - trigger.start) == ("trigger: have a look", 2)
    assert (capture.action, capture.start >= trigger.stop, capture.modules) == (
        "capture", True, ("2",),
    )  # fmt: skip
    assert (stop.action, stop.start) == ("stop", capture.stop - 1)

    text = "ddpprobe stopped training after step {}, as on_anomaly='stop' asks for: nonfinite at "
    text = text.format(stop.start) + "step 40, rank 1, 2: 1 NaN of 32 elements"
    assert done.returncode != 0
    assert text in done.stderr
    assert [(r["step"], r["text"]) for r in results] == [(stop.start, text)] * 2
    assert [r["same"] for r in results] == [True, True], "training is not bit-identical"
    assert results[0]["hashed"] >= 3
    assert [r["told"] for r in results] == [[[6, "nonfinite"]]] * 2

    ordered = {*range(trigger.start, trigger.stop), *range(capture.start, capture.stop)}
    opened = ddpprobe.open(run.path)
    for rank in (0, 1):
        said = events(run, rank, f"rank_{rank:05d}", "order", "late_order")
        assert [(e["event"], e["number"]) for e in said] == [("order", n) for n in range(3)]
        sampled = {record.step for record in opened.records(rank=rank)}
        assert sampled == {*range(0, stop.start + 1, 5), *ordered}
    pinned = events(run, 0, "daemon", "pinned")
    spans = [(e["first"], e["last"]) for e in pinned]
    assert (0, 40) in spans
    assert {*ordered} <= {step for first, last in spans for step in range(first, last + 1)}
    assert [e["number"] for e in events(run, 0, "daemon", "order")] == [0, 1, 2]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Harness]:
    with daemon_harness.harness(tmp_path) as made:
        yield made


def test_the_command_line_asks_a_live_run_and_killed_daemons_announce_nothing_twice(
    head, capsys
) -> None:
    def ask(*options: str) -> tuple[int, str, str]:
        code = main.main(["trigger", str(head.run.path), *options])
        return code, *capsys.readouterr()

    write_json(head.run.run_json, {"run_id": "test", "name": "test", "format_version": 1})
    lock = DirectoryLock(head.run.lock)
    ranks = [head.rank(r, steps=6000, delay=0.03, bad=40 if r else None) for r in range(2)]
    wait(lambda: head.acked(0) and head.acked(1))
    code, _, error = ask()
    assert (code, "is not live here" in error) == (2, True)
    assert lock.acquire()
    code, _, error = ask("--timeout", "0.2")
    assert (code, "no answer within 0.2 s" in error) == (2, True)
    daemon = head.daemon()
    (page,) = wait(lambda: posted(head.run))
    assert (page.action, page.modules) == ("capture", ("blocks.1",))
    assert page.anomaly is not None
    assert page.anomaly.step == 40

    code, out, _ = ask("--module", "blocks.*", "--steps", "3", "--reason", "a look")
    _, order = posted(head.run)
    assert (code, order.stop - order.start, order.modules) == (0, 3, ("blocks.0", "blocks.1"))
    assert order.start >= page.stop
    assert order.reason == "trigger: a look"
    assert out == (
        f"steps {order.start} to {order.stop - 1} are captured in full, on all ranks:\n"
        "  blocks.0\n  blocks.1\n"
    )
    kill(daemon)
    rng = random.Random(7)
    daemon = head.daemon()
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.wait(rng.uniform(0.5, 1.2))
    kill(daemon)
    daemon = head.daemon()
    code, out, _ = ask("--json")
    told = json.loads(out)
    assert (code, told["steps"][0] >= order.stop) == (0, True)
    assert {*told["modules"]} & {"blocks.0", "blocks.1"}
    for options, says in (
        (("--module", "nothing.*"), "no observed module matches 'nothing.*'"),
        (("--steps", "5000"), "5000 steps were asked for: it takes 1 to 1000"),
    ):
        code, _, error = ask(*options)
        assert (code, says in error) == (2, True), error
    assert list(head.run.requests.iterdir()) == []
    lock.release()
    for rank in ranks:
        kill(rank)
    assert daemon.wait(40 * PATIENCE) == 0
    orders = posted(head.run)
    assert [o.number for o in orders] == [0, 1, 2]
    assert orders[:2] == [page, order]
    said = events(head.run, 0, "daemon", "order", "pinned")
    causes = [(e["event"], e["cause"]) for e in said]
    assert len(set(causes)) == len(causes)
    assert [e["number"] for e in said if e["event"] == "order"] == [0, 1, 2]
    first, last = 0, page.anomaly.step
    assert (first, last) in [(e["first"], e["last"]) for e in said if e["event"] == "pinned"]
