"""The budget: kept within fifty steps, never flapping, and the same on all ranks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpprobe
from ddpprobe.cli.commands import info as info_command
from ddpprobe.rank.budget import LEAD_STEPS, Budget, CostMeter
from ddpprobe.rank.interval import IntervalChannel, IntervalFile, Pacer
from ddpprobe.rank.schedule import IntervalChange, Pace, Schedule
from ddpprobe.rundir import framing
from ddpprobe.rundir.heartbeat import HeartbeatWriter
from ddpprobe.rundir.journal import JournalTail, JournalWriter
from ddpprobe.rundir.paths import RunDir

REACTION = 50
Seconds = Callable[[int], float]


class Run:
    """Made steps through the arithmetic that rank 0 does, with its cadence.

    `plain`, `cost`, `watch` give the seconds of a step without a probe, what sampling adds, and
    what the watch does; `seen` is the part of both that our own clock sees, `late` the part of
    the rest of the cost that the host waits for in the next step.
    """

    def __init__(
        self, limit: float, every: int = 10, noise: float = 0.0, seed: int = 0, *,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        self.pace, self.meter = Pace(Schedule(every), narrowest=2), CostMeter(ahead=ahead)
        self.budget = Budget(limit, self.pace.every(0))
        self.orders: list[tuple[int, IntervalChange]] = []
        self.step = 0
        self._waits = 0.0
        self._noise, self._rng = noise, random.Random(seed)

    def go(
        self, steps: int, plain: float, cost: float, watch: float = 0.0, seen: float = 0.5,
        late: float = 0.0,
    ) -> int:  # fmt: skip
        """Go on for some steps; return the interval in force at the end."""
        for _ in range(steps):
            sampled = self.pace.sampled(self.step)
            wall = plain * math.exp(self._rng.gauss(0, self._noise)) + watch
            wall, own, self._waits = wall + self._waits, seen * watch, 0.0
            if sampled:
                self._waits = late * (1 - seen) * cost
                wall, own = wall + cost - self._waits, own + seen * cost
            self.meter.add(wall, own, sampled=sampled)
            if sampled or not self.step % 4:
                self.meter.settle()
                order = self.budget.decide(self.step, self.meter, sampled=sampled)
                if order is not None:
                    self.orders.append((self.step, order))
                    self.budget.follow(order)
                    self.pace.tell(order, self.step)
            self.step += 1
        return self.pace.every(self.step)

    @property
    def changes(self) -> list[int]:
        """Intervals ordered one after the other."""
        return [order.every for _, order in self.orders if order.extra < 0]


def kept(every: int, limit: float, plain: float, cost: float, watch: float = 0.0) -> bool:
    return watch + cost / every <= limit * plain * (1 + 1e-9)  # what is equal but for rounding


def test_the_least_doubling_that_keeps_the_budget_is_taken_and_held() -> None:
    run = Run(0.01)
    assert run.go(REACTION, plain=0.1, cost=0.035) == 40  # 0.9 %, where 20 would be 1.75 %
    assert run.go(1000, plain=0.1, cost=0.035) == 40
    assert run.changes == [40]


def test_what_is_cheap_is_left_as_the_user_wanted_it() -> None:
    run = Run(0.01)
    assert run.go(1000, plain=0.1, cost=0.002) == 10
    assert run.orders == []


@given(
    st.floats(0.003, 0.3), st.floats(1e-4, 1.0), st.floats(0.01, 30.0), st.integers(1, 25),
    st.floats(0.5, 1.0), st.floats(0, 0.5),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_it_converges_under_the_budget_without_a_second_thought(
    limit, plain, relative, every, seen, watch
) -> None:
    cost, watched = relative * plain, watch * limit * plain
    run = Run(limit, every)
    base = run.pace.every(0)
    end = run.go(4 * base + REACTION, plain, cost, watched, seen)
    assert kept(end, limit * 1.001, plain, cost, watched)
    if end > base:
        assert not kept(end // 2, limit * 0.79, plain, cost, watched), "wider than needed"
    ratio = run.meter.ratio(end)
    assert ratio == pytest.approx((watched + cost / end) / plain, rel=1e-6, abs=1e-9)
    assert run.go(600, plain, cost, watched, seen) == end
    assert len(run.changes) <= 1


@given(st.floats(0, 1), st.floats(0, 1), st.integers(3, 25), st.floats(0.02, 3.0))
@settings(max_examples=25, deadline=None)
def test_what_a_device_takes_is_found_wherever_the_host_waits_for_it(
    seen, late, every, relative
) -> None:
    run = Run(0.02, every, ahead=True)
    end = run.go(300, plain=0.1, cost=0.1 * relative, seen=seen, late=late)
    assert run.meter.ratio(end) == pytest.approx(relative / end, rel=0.02)
    assert kept(end, 0.02001, 0.1, 0.1 * relative)


@given(st.floats(1.5, 20.0), st.floats(0.0, 1.0), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_steps_that_become_cheaper_or_dearer_are_answered_within_fifty(factor, seen, at) -> None:
    limit, cost = 0.02, 0.03
    run = Run(limit)
    run.go(200 + at, plain=0.1, cost=cost, seen=seen)
    assert kept(run.go(REACTION, 0.1 / factor, cost, seen=seen), limit, 0.1 / factor, cost)
    run.go(1000, 0.1 / factor, cost, seen=seen)
    wide = run.pace.every(run.step)
    end = run.go(REACTION, 0.1, cost, seen=seen)
    assert kept(end, limit, 0.1, cost)
    assert end == 20 or wide == 20 == end, "as narrow as it was"


@given(st.floats(4.0, 300.0), st.floats(0.0, 1.0), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_sampling_that_becomes_dearer_is_answered_within_fifty_and_cheaper_at_the_next_sample(
    factor, seen, at
) -> None:
    limit, plain = 0.02, 0.1
    run = Run(limit)
    run.go(200 + at, plain, 0.005, seen=seen)
    wide = run.go(REACTION, plain, 0.005 * factor, seen=seen)
    assert kept(wide, limit, plain, 0.005 * factor)
    run.go(3 * wide, plain, 0.005 * factor, seen=seen)
    assert run.go(wide + REACTION, plain, 0.005, seen=seen) == 10


def test_one_step_that_something_else_held_up_changes_nothing() -> None:
    run = Run(0.01)
    run.go(200, plain=0.1, cost=0.035)
    before = run.changes
    for _ in range(12):
        run.go(37, plain=0.1, cost=0.035)
        run.go(1, plain=3.0, cost=0.035)  # a checkpoint
    assert run.changes == before


def test_a_sampled_step_that_contradicts_is_followed_by_a_second_one_soon() -> None:
    run = Run(0.01)
    wide = run.go(200, plain=0.1, cost=0.3)
    assert wide == 320
    run.go(320 - run.step + 1, plain=0.1, cost=0.005)  # the sampled step 320 is cheap again
    step, order = run.orders[-1]
    assert (step, order.extra) == (320, 320 + LEAD_STEPS)
    assert run.pace.sampled(order.extra)
    assert run.go(2 * LEAD_STEPS + 1, plain=0.1, cost=0.005) == 10


@pytest.mark.parametrize(
    ("noise", "changes", "within"), [(0.02, 2, 1.25), (0.05, 6, 1.25), (0.25, 16, 2.0)]
)
@given(seed=st.integers(0, 10**6), relative=st.floats(0.03, 4.0), seen=st.floats(0, 1))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_noise_neither_breaks_the_budget_nor_makes_it_flap(
    noise, changes, within, seed, relative, seen
) -> None:
    """Lengths of steps vary by 2, 5 and 25 %; a change that noise made is undone ever later.

    In the loudest case the interval may for a while be one doubling narrower than it should be.
    """
    limit, plain, cost = 0.02, 0.1, 0.1 * relative
    run = Run(limit, noise=noise, seed=seed)
    run.go(300, plain, cost, seen=seen)
    settled = len(run.changes)
    ends = [run.go(20, plain, cost, seen=seen) for _ in range(75)]
    assert sum(kept(end, within * limit, plain, cost) for end in ends) >= 70
    assert len(run.changes) - settled <= changes


def test_a_watch_above_the_budget_is_noticed_and_sampling_goes_on() -> None:
    run = Run(0.01)
    end = run.go(300, plain=0.001, cost=0.0003, watch=0.00003)
    assert run.budget.cannot_be_kept(run.meter)
    assert end == 160  # a quarter of the budget is left for samples, whatever the watch takes


@pytest.mark.parametrize("watch", [0.00000749, 0.00000751])
def test_a_budget_is_never_broken_in_silence(watch) -> None:
    """Sampled steps get a quarter of it, so the rest is what the watch may take."""
    run = Run(0.01)
    end = run.go(600, plain=0.001, cost=0.0003, watch=watch)
    assert kept(end, 0.01, 0.001, 0.0003, watch) or run.budget.cannot_be_kept(run.meter)
    assert run.budget.cannot_be_kept(run.meter) == (watch > 0.0000075)


@pytest.mark.parametrize("seen", [0.5, 0.75, 1.0])
def test_what_the_clock_cannot_see_is_told_of_unsampled_steps_too(seen) -> None:
    """Caches that we have emptied: sampled steps show how much of it there is."""
    run = Run(1.0)
    end = run.go(100, plain=0.001, cost=0.0008, watch=0.0002, seen=seen)
    assert run.meter.watch_seconds == pytest.approx(0.0002)
    assert run.meter.ratio(end) == pytest.approx((0.0002 + 0.0008 / end) / 0.001)


def test_what_a_device_takes_of_a_sampled_step_says_nothing_of_the_others() -> None:
    run = Run(1.0, ahead=True)
    run.go(100, plain=0.001, cost=0.0008, watch=0.0002, seen=0.5)
    assert run.meter.watch_seconds == pytest.approx(0.0001)


def test_what_the_disk_thread_carries_is_a_part_of_what_sampling_costs() -> None:
    """It does so in the steps after a sampled one."""
    meter = CostMeter()
    for step in range(60):
        sampled = not step % 10
        cost = 0.0004 * sampled
        meter.add(0.001 + cost, cost, 0.0003 if sampled else 0.0, sampled=sampled)
    meter.settle()
    assert meter.ratio(10) == pytest.approx(0.07)


def test_a_run_that_samples_every_step_tells_its_ratio_by_our_own_clock() -> None:
    meter = CostMeter()
    for _ in range(40):
        meter.add(0.11, 0.01, sampled=True)
    meter.settle()
    assert meter.ratio(1) == pytest.approx(0.1)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 7)), max_size=20),
    st.lists(st.integers(0, LEAD_STEPS), min_size=1, max_size=4), st.integers(1, 12),
)  # fmt: skip
def test_ranks_that_hear_in_time_sample_the_same_steps(changes, lags, every) -> None:
    """Rank 0 orders at random moments; each other rank reads up to eight steps later."""
    paces = [Pace(Schedule(every), narrowest=2) for _ in range(len(lags) + 1)]
    orders: dict[int, IntervalChange] = {}
    step = 0
    for wait, level in changes:
        step += wait + LEAD_STEPS
        orders[step] = IntervalChange(step + LEAD_STEPS + 1, paces[0].every(0) << level)
    for now in range(step + 3 * LEAD_STEPS):
        sampled = {pace.sampled(now) for pace in paces}
        assert len(sampled) == 1
        for pace, lag in zip(paces, [0, *lags], strict=True):
            if now - lag in orders:
                pace.tell(orders[now - lag], now)


@given(st.integers(1, 12), st.lists(st.integers(0, 7), min_size=2, max_size=6), st.integers(0, 90))
def test_a_rank_that_hears_late_takes_no_step_that_no_interval_has(every, levels, late) -> None:
    prompt, tardy = (Pace(Schedule(every), narrowest=2) for _ in range(2))
    base = prompt.every(0)
    for i, level in enumerate(levels):
        order = IntervalChange(100 * i + LEAD_STEPS, base << level)
        prompt.tell(order, 100 * i)
        for now in range(100 * i, 100 * i + 100):
            if now == 100 * i + late:
                tardy.tell(order, now)
            assert not tardy.sampled(now) or now % base == 0
            assert prompt.sampled(now) == (now % prompt.every(now) == 0)
    assert tardy.every(10**6) == prompt.every(10**6)


def test_a_notice_is_read_once_and_whole(tmp_path: Path) -> None:
    head, other = (IntervalFile(tmp_path / "pace") for _ in range(2))
    assert other.read() is None
    assert head.write(IntervalChange(40, 20))
    assert [other.read(), other.read()] == [IntervalChange(40, 20), None]
    data = bytearray((tmp_path / "pace").read_bytes())
    data[8] ^= 1
    (tmp_path / "pace").write_bytes(data)
    assert other.read() is None
    for interval_file in (head, other):
        interval_file.close()
    assert not head.write(IntervalChange(1, 1))
    assert other.read() is None


@pytest.fixture
def pacer(tmp_path: Path) -> Iterator[Callable[..., Pacer]]:
    """Rank 0's part with a budget of 1 %, alone or with a file: `pacer(notice=None)`."""
    made: list[Pacer] = []
    journal = JournalWriter(tmp_path / "journal", {})
    heartbeat = HeartbeatWriter(tmp_path / "beat")

    def make(interval_file: IntervalFile | None = None) -> Pacer:
        channel = IntervalChannel(interval_file)
        made.append(Pacer(Schedule(10), 0.01, channel, journal, heartbeat, leads=True))
        return made[-1]

    yield make
    for each in made:
        each.close()
    heartbeat.close()
    journal.close()


def drive(pacer: Pacer, steps: int, plain: float, cost: float, watch: float = 0.0) -> list[int]:
    """Go through steps; return those that were sampled."""
    seconds = own = 0.0
    taken = []
    for step in range(steps):
        sampled = pacer.sampled(step)
        part = watch + cost * sampled
        seconds, own = seconds + plain + part, own + part
        taken += [step] * sampled
        pacer.end_step(step, seconds, own, sampled=sampled)
    return taken


def test_what_the_other_ranks_cannot_hear_does_not_hold_here_either(pacer, tmp_path: Path) -> None:
    deaf = IntervalFile(tmp_path / "pace")
    deaf.close()
    assert drive(pacer(), 200, plain=0.1, cost=0.035) == [0, 10, 20, 40, 80, 120, 160]
    assert drive(pacer(deaf), 200, plain=0.1, cost=0.035) == list(range(0, 200, 10))


def test_a_budget_that_no_interval_can_keep_is_told_once(pacer, caplog) -> None:
    drive(pacer(), 500, plain=0.001, cost=0.0001, watch=0.00002)
    (record,) = caplog.records
    assert record.getMessage() == (
        "ddpprobe: budget=0.01 cannot be kept: watching a step that is not sampled takes 0.02 of "
        "its 1 ms, and sampled steps up to a quarter of the budget besides. Give a larger budget=, "
        "or none and choose every=."
    )


def test_a_pause_is_no_step(pacer) -> None:
    paused = pacer()
    drive(paused, 20, plain=0.1, cost=0.001)
    paused.pause()
    assert drive(paused, 200, plain=0.1, cost=0.001) == list(range(0, 200, 10))


JOB = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

now = 0.0  # the clock of the host, which moves where this job says so
time.perf_counter, time.thread_time = lambda: now, lambda: 0.0  # before ours takes hold of it
import ddpprobe
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.step import IN_TURN
from ddpprobe.testing import state_hash

STEPS, SLOW, OUT = 160, range(40, 100), Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["GROUP_RANK"] = str(rank // 2)  # the third rank is on a node of its own
os.environ["LOCAL_RANK"] = str(rank % 2)
quick, slow = StepRows.add, False


def add(rows, slot, *args, **kwargs):
    global now
    now += 0.008 * (slow and rows.table.site(slot).kind not in IN_TURN)
    quick(rows, slot, *args, **kwargs)


StepRows.add = add


def train(budget):
    global now, slow
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    if budget:
        probe = ddpprobe.install(
            model, run_dir=OUT / "run", every=5, budget=budget, daemon="none"
        )
        beat = probe._recorder._heartbeat
    seen = []
    for step in range(STEPS if budget else 20):
        slow = step in SLOW
        if budget:
            now += 0.01
            seen.append((beat.every, beat.overhead_ratio))
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 19:
            hashed = state_hash(model, optimizer)
    if budget:
        probe.close()
    return hashed, seen


bare, _ = train(None)
probed, seen = train(0.4)
(OUT / f"{rank}.json").write_text(json.dumps({"same": bare == probed, "seen": seen}))
dist.destroy_process_group()
time.sleep(0.5)
"""


def test_a_slow_statistic_widens_the_interval_on_all_ranks_and_a_quick_one_narrows_it(
    torchrun, tmp_path: Path
) -> None:
    """Three ranks on two nodes: one hears from a file, the other over the job's store.

    The clock is the job's own: a step takes 10 ms, and each of the 16 rows of a slow one 8 ms
    (but those of weights).
    """
    done = torchrun([_script(tmp_path), tmp_path], nproc=3, fresh=True)  # of ddpprobe, too
    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(each["same"] for each in said), "training is not bit-identical"
    for each in said:
        every, ratio = zip(*each["seen"], strict=True)
        assert every == (*[5] * 54, *[40] * 83, *[5] * 23)  # as it is when a step begins
        assert ratio[46] == pytest.approx(16 * 0.8 / 5)
        assert ratio[60] == pytest.approx(16 * 0.8 / 40)
    journals = [_journal(tmp_path / "run", rank) for rank in range(3)]
    assert journals[0] == journals[1] == journals[2]
    changes, sampled = journals[0]
    assert changes == [(0, 5), (53, 40), (136, 5)]
    assert sampled == [*range(0, 51, 5), 80, 120, 128, *range(140, 160, 5)]
    info = ddpprobe.open(tmp_path / "run").info()
    assert (info["pace"]["step"], info["pace"]["every"]) == changes[-1]
    (line,) = [line for line in info_command.lines(info) if line.startswith("sampling")]
    assert "every 5 steps, " in line
    assert line.endswith((" within budget=0.4", f" from step {changes[-1][0]} on by budget=0.4"))


def _script(directory: Path) -> Path:
    path = directory / "job.py"
    path.write_text(JOB)
    return path


def _journal(run: Path, rank: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return what a rank has said of its interval, and the steps that it sampled."""
    tail = JournalTail(RunDir(run).rank_journal(0, f"node_{rank // 2:04d}", rank))
    frames = list(tail.poll())
    tail.close()
    said = [frame.json() for frame in frames if frame.type == framing.LIFE]
    records = [
        framing.decode_record(f.payload, tail.tables) for f in frames if f.type == framing.RECORD
    ]
    changes = [(life["step"], life["every"]) for life in said if life["event"] == "budget"]
    return changes, [record.step for record in records]
