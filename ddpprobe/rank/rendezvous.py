"""How the ranks agree, once, at `install()`: through the job's own store, with no collective.

They meet under a new name. Then come two rounds: in each, every rank says its part or its error;
rank 0 hears all and answers once for everybody. So a mistake on one rank is an error on every rank,
before training starts, and a rank that never calls `install()` is named instead of waited for.

While training goes on nothing may wait for a store: a `StoreChannel` is for words that may come or
not.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, final

from ddpprobe.errors import InstallError
from ddpprobe.rank.torch_private import tcp_store
from ddpprobe.rundir.fuse import logger

TIMEOUT_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2  # seconds between two looks for rank 0
ANSWER_SECONDS = 2.0  # for a store that answers in 0.1 ms; what training would stand still, once


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def check(self, keys: list[str]) -> bool:
        """Whether keys exist."""

    def get(self, key: str) -> bytes:
        """Get a key."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Wait until keys exist."""


def meet(
    store: Store,
    topic: str,
    rank: int,
    world_size: int,
    timeout: float = TIMEOUT_SECONDS,
    call: str = "ddpprobe.install()",
) -> str:
    """Wait for all ranks; return a name for what they say: the same for all, and new.

    A store may hold what an earlier attempt said, and nothing that a launcher tells its ranks is a
    number of the attempt that is the same on all nodes (`TORCHELASTIC_RESTART_COUNT` counts the
    failures of a node). So rank 0 makes the name up. A rank that has found the name of an attempt
    that is over waits in vain until it finds the new one; an answer that was there before it came
    is not for it.

    Args:
        store: shared by all ranks.
        topic: of the meeting; a key of it holds the name while it lasts.
        rank: of this process.
        world_size: number of ranks.
        timeout: seconds to wait for the others.
        call: what a rank that does not come should have called, for the message.

    Raises:
        InstallError: some rank did not come.
    """
    key = f"{topic}/name"
    if rank > 0:
        return _invited(store, key, rank, 1.5 * timeout)
    name = f"{topic}/{uuid.uuid4().hex}"
    store.set(key, name)
    absent = _absent(store, name, world_size, timeout)
    if absent is None:
        store.set(key, "")
        store.set(f"{name}/met", "")
        return name
    error = _did_not_come(absent, world_size, call, timeout)
    store.set(f"{name}/met", error)
    raise InstallError(error)


def _invited(store: Store, key: str, rank: int, timeout: float) -> str:
    """Return the name under which rank 0 has met this rank, see `meet`."""
    error = f"rank 0 did not answer within {timeout:.0f} s"
    name, over, pause, began = "", "", FIRST_PAUSE, time.monotonic()
    while time.monotonic() - began < timeout:
        if name and store.check([f"{name}/met"]):
            if error := store.get(f"{name}/met").decode():
                raise InstallError(error)
            return name
        now = store.get(key).decode() if store.check([key]) else ""
        if not now or now in (name, over):
            # Not `wait`: torch prints a warning whenever one ends without the key.
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        elif store.check([f"{now}/met"]):
            over, error = now, store.get(f"{now}/met").decode()  # of this attempt, or of another
        else:
            name = now
            store.set(f"{name}/here/{rank}", "")
    raise InstallError(error)


def _absent(store: Store, name: str, world_size: int, timeout: float) -> int | None:
    """Return the first rank that does not come; None if all do."""
    keys = [f"{name}/here/{rank}" for rank in range(1, world_size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError:  # torch's DistStoreError is one
        return next((rank for rank, key in enumerate(keys, 1) if not store.check([key])), None)
    return None


def _did_not_come(rank: int, world_size: int, call: str, timeout: float) -> str:
    return (
        f"rank {rank} of {world_size} did not call {call} within {timeout:.0f} s. Call it on every "
        "rank, in the same order."
    )


def round_trip(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    mine: Callable[[], Mapping[str, Any]],
    decide: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    timeout: float = TIMEOUT_SECONDS,
    call: str = "ddpprobe.install()",
) -> dict[str, Any]:
    """Let every rank speak and rank 0 answer; return the answer.

    Args:
        store: shared by all ranks; keys start with `name`, which must be new.
        name: of this round.
        rank: of this process.
        world_size: number of ranks.
        mine: makes this rank's part (JSON); ValueError or OSError from it refuses for all.
        decide: on rank 0, makes the answer from all parts in rank order; may refuse likewise.
        timeout: seconds to wait for the others.
        call: what a rank that does not come should have called, for the message.

    Raises:
        InstallError: some rank refused or did not come.
    """
    with _told(store, f"{name}/{rank}", *([f"{name}/answer"] if rank == 0 else [])):
        said = _attempt(mine)
    store.set(f"{name}/{rank}", json.dumps(said))
    if rank == 0:
        with _told(store, f"{name}/answer"):
            answered = _answer(store, name, world_size, decide, timeout, call)
        store.set(f"{name}/answer", json.dumps(answered))
    _wait(store, f"{name}/answer", timeout * 1.5, "rank 0 did not answer")
    answer: dict[str, Any] = json.loads(store.get(f"{name}/answer"))
    if "error" in answer:
        raise InstallError(answer["error"])
    return answer


@contextlib.contextmanager
def _told(store: Store, *keys: str) -> Iterator[None]:
    """Let what is raised go on, and the others know: they would wait for it in vain."""
    try:
        yield
    except BaseException as error:
        for key in keys:
            store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise


def _answer(
    store: Store,
    name: str,
    world_size: int,
    decide: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    timeout: float,
    call: str,
) -> dict[str, Any]:
    heard: list[dict[str, Any]] = []
    deadline = datetime.datetime.now(tz=datetime.UTC) + datetime.timedelta(seconds=timeout)
    for rank in range(world_size):
        left = (deadline - datetime.datetime.now(tz=datetime.UTC)).total_seconds()
        try:
            _wait(store, f"{name}/{rank}", max(left, 0.1), "")
        except InstallError:
            return {"error": _did_not_come(rank, world_size, call, timeout)}
        part = json.loads(store.get(f"{name}/{rank}"))
        if "error" in part:
            where = f"rank {rank}: " if world_size > 1 else ""
            return {"error": where + part["error"]}
        heard.append(part)
    return _attempt(lambda: decide(heard))


def _attempt(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    try:
        return dict(make())
    except (ValueError, OSError) as error:
        return {"error": str(error)}


def _wait(store: Store, key: str, seconds: float, message: str) -> None:
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except RuntimeError as error:  # torch's DistStoreError is one
        raise InstallError(f"{message} within {seconds:.0f} s") from error


@final
class StoreChannel:
    """Words from rank 0 to those that listen, one after the other, while training goes on.

    It has a connection to the job's store of its own. The first word that the store does not take
    or give within two seconds is the last: the line is dead from then on, and nobody waits again.

    Args:
        store: of the job.
        name: of the line, the same at both ends and new.

    Raises:
        ValueError: this store has no connections on which a wait can be limited.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = tcp_store.bounded(store, ANSWER_SECONDS)
        if self._store is None:
            raise ValueError(
                f"budget= on several nodes needs a TCPStore, as torchrun gives; this job has a "
                f"{type(store).__name__}. Leave budget= out and choose every=."
            )
        self._name = name
        self._count = 0

    def say(self, word: str) -> None:
        """Say the next word."""
        if self._store is not None:
            try:
                self._store.set(f"{self._name}/{self._count}", word)
            except RuntimeError as error:
                self._drop(error)
            self._count += 1

    def hear(self) -> str | None:
        """Return the next word, if it was said: 0.1 ms over a network."""
        if self._store is None:
            return None
        key = f"{self._name}/{self._count}"
        try:
            if not self._store.check([key]):
                return None
            word = self._store.get(key).decode()
        except RuntimeError as error:
            self._drop(error)
            return None
        self._count += 1
        return word

    def close(self) -> None:
        """Let the connection go."""
        self._store = None

    def _drop(self, error: RuntimeError) -> None:
        self._store = None
        logger.warning(
            "ddpprobe: the job's store does not answer, so this node goes on sampling as it does "
            "now, whatever the others agree on (%s)", str(error).partition("\n")[0],
        )  # fmt: skip
