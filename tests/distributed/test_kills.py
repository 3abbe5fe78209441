"""kill -9 of one rank, of all ranks, of the daemon: what was acknowledged is there afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

import ddpprobe
from ddpprobe.reader.run import Run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import paths
from ddpprobe.store.reader import StoredGroup

from ..nursery import nursery
from ..timed import untimed
from ..waiting import PATIENCE

NODE = paths.node_name(0)
DRAWS = int(os.environ.get("DDPPROBE_TEST_DRAWS", "3"))  # of each test; more by tests.faults
TOGETHER = 3  # launches at a time
STEPS, EVERY, SLEEP = 60, 2, 0.02
# Ranks that need not import torch would have trained before there is a daemon.
TINY = (
    "--steps", STEPS, "--every", EVERY, "--daemon", "auto", "--behind-daemon", "--micros", 1,
)  # fmt: skip


def in_draws(draw: Callable[[int], None]) -> None:
    """Run all draws, some at a time; every failure is reported with its number."""

    with ThreadPoolExecutor(TOGETHER) as pool:
        ends = [pool.submit(draw, number) for number in range(DRAWS)]
    failures = []
    for number, end in enumerate(ends):
        if (error := end.exception()) is not None:
            error.add_note(f"draw {number}")
            failures.append(error)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {DRAWS} draws failed", failures)


def sleep_into(launched, rng: random.Random, last: int) -> None:
    """Return at a random moment of a random step, before step `last`."""
    step = rng.randrange(last)
    journals = [launched.run.rank_journal(0, NODE, rank) for rank in (0, 1)]
    launched.until(lambda: all(journal.is_dir() for journal in journals))
    launched.until(lambda: len(launched.finished(0)) >= step)
    time.sleep(rng.uniform(0, 2 * SLEEP))


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
    """Somebody of `ranks` is named first, and how it died, if the daemon was there to see it.

    Of several that were killed at once the one that is proven to be the first is named, or nobody.
    """
    deaths = run.deaths()
    if not deaths:  # killed while it was starting the daemon: there is none to name anybody
        assert not paths.RunDir(run.path).daemon_journal(0, NODE).is_dir(), "no death is named"
        return
    if len(ranks) > 1 and not deaths[0].first:  # all at once: nothing proves an order
        end = run.info()["attempts"][0]["end"]
        assert (end["state"], end["ranks"], end["how"]) == ("unknown", [], "SIGKILL"), end
        # Between two steps it may as well be how a script ends its workers: a warning then.
        (lost,) = untimed(run.anomalies())
        assert (lost.detector, lost.rank, "SIGKILL" in lost.message) == ("rank_lost", None, True)
        assert lost.level in {"page", "warn"}
        return
    assert deaths[0].first
    seen = deaths[0].signal != "unknown"
    assert seen or not watched, deaths
    assert not seen or (deaths[0].rank in ranks and deaths[0].signal == "SIGKILL"), deaths
    pages = [a for a in run.anomalies() if a.level == "page"]
    assert [(a.detector, a.rank, a.first_cause) for a in pages] == [
        ("rank_lost", deaths[0].rank, True)
    ], pages
    assert deaths[0].signal in pages[0].message


def is_watched(launched) -> bool:
    """Whether the daemon has seen the ranks: its first words come after that."""
    return launched.run.daemon_journal(0, NODE).is_dir()


def test_one_rank_is_killed(launch) -> None:
    def draw(number: int) -> None:
        rng = random.Random(f"one {number}")
        launched = launch(f"one{number}", *TINY, "--sleep", SLEEP, fresh=False)
        sleep_into(launched, rng, STEPS - 10)
        watched = is_watched(launched)
        victim = rng.randrange(2)
        launched.rank(victim).kill()
        assert launched.wait() == 1, launched.log
        launched.wait_for_the_daemon_to_end()
        run = assert_nothing_acknowledged_is_lost(launched)
        assert_first_death(run, {victim}, watched=watched)

    in_draws(draw)


def test_all_ranks_are_killed(launch) -> None:
    def draw(number: int) -> None:
        rng = random.Random(f"all {number}")
        launched = launch(f"all{number}", *TINY, "--sleep", SLEEP, fresh=False)
        sleep_into(launched, rng, STEPS - 10)
        watched = is_watched(launched)
        for rank in (0, 1):
            launched.rank(rank).kill()
        assert launched.wait() == 1, launched.log
        launched.wait_for_the_daemon_to_end()
        run = assert_nothing_acknowledged_is_lost(launched)
        assert_first_death(run, {0, 1}, watched=watched)

    in_draws(draw)


def test_the_daemon_is_killed(launch) -> None:
    """In some draws training goes on long enough for its ranks to start another one; in some the
    first is killed when they have ended and it is about to seal."""

    def draw(number: int) -> None:
        rng = random.Random(f"daemon {number}")
        late = number % 3 == 1  # nobody is left to start another one
        patient = number % 5 == 0 and not late
        sleep = 0.12 if patient else SLEEP
        launched = launch(f"daemon{number}", *TINY, "--sleep", sleep, fresh=False)
        first = psutil.Process(launched.until(launched.daemon))
        if late:
            launched.until(lambda: len(launched.finished(1)) == STEPS)
            time.sleep(rng.uniform(0, 0.6))
        else:
            sleep_into(launched, rng, STEPS // 6 if patient else STEPS)
        with contextlib.suppress(psutil.NoSuchProcess):  # late: it had finished before
            first.kill()
        if patient:
            launched.until(lambda: launched.daemon() not in {None, first.pid})
        assert launched.wait() == 0, launched.log
        launched.wait_for_the_daemon_to_end()
        assert launched.finished(0) == launched.finished(1) == list(range(STEPS))
        run = assert_nothing_acknowledged_is_lost(launched)
        assert run.deaths() == untimed(run.anomalies()) == []
        if not patient:  # what `ddpprobe daemon --dir RUN` does afterwards
            with (launched.directory / "by hand").open("w") as log:
                words = ["-m", "ddpprobe.daemon", "--dir", str(launched.path)]
                by_hand = nursery().start(words, os.environ, log.fileno(), log.fileno())
            assert by_hand.wait(60 * PATIENCE) == 0
            run = assert_nothing_acknowledged_is_lost(launched)
        assert run.deaths() == untimed(run.anomalies()) == []
        assert run.info()["attempts"][0]["sealed"]
        rows = [step for step, _ in StoredGroup(launched.run, "attempt_000/merged").steps()]
        assert rows == list(range(0, STEPS, EVERY)), "a merged step was written down twice"

    in_draws(draw)
