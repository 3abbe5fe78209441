"""kill -9 of one rank, of all ranks, of the daemon: what was acknowledged is there afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import ddpprobe
from ddpprobe.replay.run import Run
from ddpprobe.replay.verify import verify

DRAWS = 10
TOGETHER = 2  # launches at a time
STEPS, EVERY, SLEEP = 60, 2, 0.02
TINY = ("--steps", STEPS, "--every", EVERY, "--daemon", "auto", "--micros", 1)


def in_draws(draw: Callable[[int], None]) -> None:
    """Run all draws, some at a time; every failure is reported with its number."""

    def one(number: int) -> BaseException | None:
        try:
            draw(number)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"draw {number}")
            return error
        return None

    with ThreadPoolExecutor(TOGETHER) as pool:
        failures = [e for e in pool.map(one, range(DRAWS)) if e is not None]
    if failures:
        raise BaseExceptionGroup("draws that failed", failures)


def sleep_into(run, rng: random.Random, last: int) -> int:
    """Return at a random moment of a random step; its number is returned as well."""
    step = rng.randrange(last)
    run.until(lambda: len(run.finished(0)) >= step and len(run.ranks()) == 2)
    run.until(lambda: all(run.run.rank_journal(0, "node_0000", r).is_dir() for r in (0, 1)))
    time.sleep(rng.uniform(0, 2 * SLEEP))
    return step


def assert_nothing_acknowledged_is_lost(launched) -> Run:
    """Open the run and compare it with what the ranks said they had finished."""
    run = ddpprobe.open(launched.path)
    report = verify(run)
    assert report.ok, report.damage
    written = {}
    for rank in (0, 1):
        steps = [record.step for record in run.records(rank=rank)]
        assert steps == sorted(set(steps)), f"rank {rank} twice or out of order"
        acknowledged = {s for s in launched.finished(rank) if s % EVERY == 0}
        assert acknowledged <= set(steps), f"rank {rank} lost {acknowledged - set(steps)}"
        written[rank] = set(steps)
    merged = [record for record in run.records() if record.sampled]
    both = written[0] & written[1]
    assert [m.step for m in merged] == sorted(written[0] | written[1])
    assert [m.step for m in merged] == list(range(0, EVERY * len(merged), EVERY))
    assert [m.step for m in merged if m.ranks == (0, 1)] == sorted(both)
    assert run.lost == []
    return run


def assert_first_death(run: Run, ranks: set[int], *, watched: bool) -> None:
    """Somebody of `ranks` is named first; how it died is known if the daemon was there to see."""
    deaths = run.deaths()
    assert deaths, "no death is named"
    assert deaths[0].first
    assert deaths[0].rank in ranks, deaths
    assert deaths[0].signal == "SIGKILL" or (not watched and deaths[0].signal == "unknown"), deaths
    pages = [a for a in run.anomalies() if a.level == "page"]
    assert [(a.detector, a.rank, a.first_cause) for a in pages] == [
        ("rank_lost", deaths[0].rank, True)
    ], pages
    assert deaths[0].signal in pages[0].message


def is_watched(launched) -> bool:
    """Whether the daemon has seen the ranks: its first words come after that."""
    return launched.run.daemon_journal(0, "node_0000").is_dir()


def test_one_rank_is_killed(launch) -> None:
    def draw(number: int) -> None:
        rng = random.Random(f"one {number}")
        launched = launch(f"one{number}", *TINY, "--sleep", SLEEP)
        step = sleep_into(launched, rng, STEPS - 10)
        watched = is_watched(launched)
        victim = rng.randrange(2)
        launched.ranks()[victim].kill()
        assert launched.wait() == 1, launched.log
        launched.wait_for_the_daemon_to_end()
        run = assert_nothing_acknowledged_is_lost(launched)
        assert_first_death(run, {victim}, watched=watched)
        print(number, step, victim, watched, run.deaths(), f"{launched.seconds:.1f}")

    in_draws(draw)


def test_all_ranks_are_killed(launch) -> None:
    def draw(number: int) -> None:
        rng = random.Random(f"all {number}")
        launched = launch(f"all{number}", *TINY, "--sleep", SLEEP)
        step = sleep_into(launched, rng, STEPS - 10)
        watched = is_watched(launched)
        for rank in launched.ranks().values():
            rank.kill()
        assert launched.wait() == 1, launched.log
        launched.wait_for_the_daemon_to_end()
        run = assert_nothing_acknowledged_is_lost(launched)
        assert_first_death(run, {0, 1}, watched=watched)
        print(number, step, watched, run.deaths(), f"{launched.seconds:.1f}")

    in_draws(draw)


def test_the_daemon_is_killed(launch) -> None:
    """In every third draw training goes on long enough for the ranks to start another one."""

    def draw(number: int) -> None:
        rng = random.Random(f"daemon {number}")
        patient = number % 3 == 0
        launched = launch(f"daemon{number}", *TINY, "--sleep", 0.15 if patient else SLEEP)
        first = launched.until(launched.daemon)
        time.sleep(rng.uniform(0, 1.0))
        os.kill(first, signal.SIGKILL)
        if patient:
            second = launched.until(lambda: launched.daemon() not in {None, first})
            assert second
        assert launched.wait() == 0, launched.log
        launched.wait_for_the_daemon_to_end()
        assert launched.finished(0) == launched.finished(1) == list(range(STEPS))
        run = assert_nothing_acknowledged_is_lost(launched)
        assert run.deaths() == run.anomalies() == []
        if not patient:
            command = [sys.executable, "-m", "ddpprobe.daemon", "--dir", str(launched.path)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            run = assert_nothing_acknowledged_is_lost(launched)
        assert run.info()["attempts"][0]["sealed"]
        print(number, patient, f"{launched.seconds:.1f}")

    in_draws(draw)
