"""Calls a function on every rank of a model, each in a process of its own, forked from one server.

The server has imported torch and the libraries, which takes ten seconds, and nothing of ddpprobe.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from tests.models.training import Architecture

T = TypeVar("T")
PATIENCE = 300.0  # seconds for all ranks of one call: many times what the slowest takes
_forking = multiprocessing.get_context("forkserver")


class Died(RuntimeError):
    """A rank raised, ended without a word, or took too long."""


def import_first(modules: Iterable[str]) -> None:
    """Let the server import `modules` before it forks; only before the first call."""
    _forking.set_forkserver_preload([*modules])


def on_ranks(
    function: Callable[..., T], architecture: Architecture, *arguments: object
) -> list[T]:  # fmt: skip
    """Return what `function(architecture, rank, *arguments)` returns on each rank.

    The function goes by its name into the new process, and the architecture by its title.

    Raises:
        Died: a rank has no result; it says why.
    """
    with tempfile.TemporaryDirectory(prefix="ddpprobe-models-") as scratch:
        ranks = []
        for rank in range(architecture.world):
            ours, theirs = _forking.Pipe(duplex=False)
            place = (architecture.title, rank, architecture.world, str(Path(scratch, "store")))
            process = _forking.Process(target=_be, args=(theirs, place, function, arguments))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _results([ours for _, ours in ranks])
        finally:
            for process, ours in ranks:
                process.kill()
                process.join()
                ours.close()


def _results(ranks: list[Connection]) -> list[Any]:
    """Return what each rank has sent; the first that fails ends it, as others may wait for it."""
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        ready = wait([ours for rank, ours in enumerate(ranks) if rank not in found], PATIENCE)
        if not ready:
            raise Died(f"{len(ranks) - len(found)} ranks: nothing after {PATIENCE:.0f} s")
        for rank in map(ranks.index, ready):
            try:
                found[rank], error = ranks[rank].recv()
            except EOFError:
                raise Died(f"rank {rank}: its process died") from None
            if error:
                raise Died(f"rank {rank}: {error}")
    return [found[rank] for rank in range(len(ranks))]


def _be(
    theirs: Connection, place: tuple[str, int, int, str], function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:  # fmt: skip
    """Be one rank: the process, from its beginning to its end."""
    title, rank, world, store = place
    warnings.filterwarnings("ignore")
    os.environ |= {"OMP_NUM_THREADS": "1", "DDPPROBE_STRICT": "1"}
    try:
        theirs.send((_call(title, rank, world, store, function, arguments), ""))
    except BaseException:  # noqa: BLE001  (whatever it was, it is this rank's result)
        theirs.send((None, "".join(traceback.format_exc().splitlines(keepends=True)[-40:])))
    wait([theirs], PATIENCE)  # torch with gloo aborts now and then at its exit: it is killed
    os._exit(0)


def _call(
    title: str, rank: int, world: int, store: str, function: Callable[..., object],
    arguments: tuple[object, ...],
) -> object:  # fmt: skip
    import torch
    import torch.distributed as dist

    from tests.models.listed import find

    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world
        )
    return function(find(title), rank, *arguments)
