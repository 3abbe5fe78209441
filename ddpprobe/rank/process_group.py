"""The job that this process is a rank of, as torch knows it."""

from __future__ import annotations

import logging
import os

from torch import distributed as dist

from ddpprobe.rank import rendezvous, torch_private

logger = logging.getLogger("ddpprobe")
_rounds = 0


def exists() -> bool:
    """Whether the script has begun a process group by now."""
    return dist.is_available() and dist.is_initialized()


def leads() -> bool:
    """Whether this is rank 0 of the process group, or there is none (yet)."""
    return not exists() or dist.get_rank() == 0


def backend() -> str:
    """Name of the process group's backend, "" without one."""
    return str(dist.get_backend()) if exists() else ""


def job() -> tuple[int, int, rendezvous.Store]:
    """Return this process's rank, the number of ranks, and a store that all of them see."""
    if not exists():
        return 0, 1, dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
    store = torch_private.default_store()
    if store is None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]  # not in its __all__
    return dist.get_rank(), dist.get_world_size(), store


def tell_missing() -> None:
    """Say that ranks cannot agree on a run."""
    logger.warning(
        "ddpprobe: WORLD_SIZE is %s, but there is no process group to agree through, so nothing is "
        "recorded. Call torch.distributed.init_process_group() before training, or unset "
        "WORLD_SIZE if the processes are jobs of their own.",
        os.environ.get("WORLD_SIZE"),
    )


def topic() -> str:
    """Name this call of `install()` in the store: the same on all ranks, another for each call."""
    global _rounds  # noqa: PLW0603  (the count of them is what all ranks have in common)
    # Rank 0 may have been a job of its own before, which the others know nothing of.
    _rounds += exists()
    return f"ddpprobe/{_rounds}"
