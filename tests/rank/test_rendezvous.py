"""An error on one rank is an error on every rank; a rank that does not come is named."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from ddpprobe.errors import InstallError
from ddpprobe.rank import rendezvous
from ddpprobe.rank.rendezvous import StoreChannel, meet, round_trip
from ddpprobe.rank.torch_private import tcp_store
from tests.forked_script import Script


def all_ranks(world: int, mine: Callable[[int], dict], decide=len, timeout=60.0, absent=()):
    store = dist.HashStore()
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = round_trip(
                store, "r", rank, world, lambda: mine(rank), decide, timeout=timeout
            )
        except InstallError as error:
            results[rank] = str(error)
        except LookupError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world) if r not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_gets_the_one_answer() -> None:
    got = all_ranks(3, lambda r: {"r": r}, lambda heard: {"sum": sum(h["r"] for h in heard)})
    assert got == {r: {"sum": 3} for r in range(3)}


def test_one_ranks_error_reaches_all_with_its_number() -> None:
    def mine(rank: int) -> dict:
        if rank == 2:
            raise ValueError("no such directory")
        return {}

    got = all_ranks(3, mine)
    assert set(got.values()) == {"rank 2: no such directory"}


def test_the_head_may_refuse_for_all() -> None:
    def decide(heard) -> dict:
        raise OSError("disk is gone")

    assert set(all_ranks(2, lambda r: {}, decide).values()) == {"disk is gone"}


@pytest.mark.parametrize("broken", [0, 2])
def test_what_no_one_expected_on_one_rank_reaches_all_at_once(broken: int) -> None:
    def mine(rank: int) -> dict:
        if rank == broken:
            raise LookupError("no such process")
        return {}

    got = all_ranks(3, mine)
    assert isinstance(got[broken], LookupError)
    # Without a word from it they would say that it did not come, after all of the time.
    (said,) = {got[rank] for rank in range(3) if rank != broken}
    assert said == f"rank {broken}: LookupError: no such process".removeprefix("rank 0: ")


def test_what_no_one_expected_of_the_head_reaches_all() -> None:
    def decide(heard) -> dict:
        raise LookupError("no such process")

    got = all_ranks(3, lambda r: {}, decide)
    assert {got[rank] for rank in (1, 2)} == {"LookupError: no such process"}


def test_a_rank_that_does_not_call_is_named() -> None:
    got = all_ranks(3, lambda r: {}, timeout=0.5, absent=(1,))
    assert set(got) == {0, 2}
    for message in got.values():
        assert "rank 1 of 3 did not call ddpprobe.install()" in message


def all_meet(store, world: int = 3, timeout: float = 60.0, *, absent=(), first=()):
    """Return what each rank met under, or why not; some ranks are there before rank 0 is."""
    results: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = meet(store, "t", rank, world, timeout)
        except InstallError as error:
            results[rank] = str(error)

    threads = {r: threading.Thread(target=run, args=(r,)) for r in range(world) if r not in absent}
    for rank in (*first, *(r for r in threads if r not in first)):
        threads[rank].start()
        if rank in first:
            threads[rank].join(0.1)
    for thread in threads.values():
        thread.join()
    return results


def test_each_meeting_has_a_name_of_its_own() -> None:
    store, names = dist.HashStore(), set()
    for _ in range(3):
        (name,) = set(all_meet(store, first=(2,)).values())
        names.add(name)
    assert len(names) == 3
    assert all_meet(store, world=1).keys() == {0}


def test_a_rank_that_finds_the_name_of_an_attempt_that_is_over_meets_under_the_new_one() -> None:
    """Rank 0 was ended while it waited; its successor comes after the others."""
    store = dist.HashStore()
    store.set("t/name", "t/old")
    got = all_meet(store, first=(1, 2))
    assert store.check(["t/old/here/1"])
    assert len(set(got.values())) == 1
    assert got[0] != "t/old"


def test_a_rank_that_does_not_come_to_meet_is_named_on_all_others() -> None:
    store = dist.HashStore()
    got = all_meet(store, timeout=0.5, absent=(1,))
    assert set(got) == {0, 2}
    for message in got.values():
        assert "rank 1 of 3 did not call ddpprobe.install() within 0 s" in message
    late = all_meet(store, timeout=0.5, absent=(0, 2))
    assert late == {1: got[0]}
    alone = all_meet(dist.HashStore(), timeout=0.5, absent=(0,))
    assert set(alone.values()) == {"rank 0 did not answer within 1 s"}
    again = all_meet(store)  # a rank that comes anew does not take the old answer for its own
    assert len(set(again.values())) == 1
    assert again[0].startswith("t/")


def test_an_install_error_is_a_value_error_and_a_runtime_error() -> None:
    with pytest.raises(ValueError, match="x"):
        raise InstallError("x")
    assert issubclass(InstallError, RuntimeError)


HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_line_carries_words_until_its_store_stops_answering_and_then_costs_nothing(
    monkeypatch, caplog, poll, tmp_path
) -> None:
    """torch's own timeouts do not hold for a host that is stopped: `check` never returns."""
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 60.0)  # a busy host may take its time ...
    host = Script(tmp_path, HOST)
    try:
        poll(lambda: host.stdout.endswith("\n"), 60)
        store = dist.TCPStore("127.0.0.1", int(host.stdout), is_master=False)
        said, heard = (StoreChannel(dist.PrefixStore("job", store), "pace") for _ in range(2))
        assert heard.hear() is None
        for word in ("one", "two"):
            said.say(word)
        assert [poll(heard.hear), poll(heard.hear), heard.hear()] == ["one", "two", None]
        os.kill(host.pid, signal.SIGSTOP)
        for line in (said, heard):  # ... and one that is stopped is not waited for
            descriptor = re.search(r"\bfd=(\d+)", repr(line._store))
            assert tcp_store._limit(int(descriptor[1]), store.port, 0.3)
        assert heard.hear() is None
        os.kill(host.pid, signal.SIGKILL)
        said.say("three")
        assert [heard.hear(), said.hear()] == [None, None]
    finally:
        if host.poll() is None:
            os.kill(host.pid, signal.SIGKILL)
        host.end()
    assert caplog.text.count("the job's store does not answer") == 2


def test_a_store_without_connections_has_no_line() -> None:
    with pytest.raises(ValueError, match=r"needs a TCPStore.* this job has a HashStore\. Leave"):
        StoreChannel(dist.HashStore(), "pace")
