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
from ddpprobe.rank.rendezvous import StoreChannel, round_trip
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
