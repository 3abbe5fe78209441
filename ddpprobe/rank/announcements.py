"""What `install()` tells `ddpprobe run`, which then leaves it to the script, and the log."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ddpprobe.rundir.fuse import logger

_waiting: list[Callable[[], object]] = []


def when_installed(act: Callable[[], object]) -> None:
    """Have `act` called once, as the script's next call of `install()` begins."""
    _waiting.append(act)


def announce_install() -> None:
    """Tell whoever waits that the script calls for a probe itself."""
    while _waiting:
        _waiting.pop()()


@functools.cache
def tell_many(probes: int) -> None:
    """Say once how many probes are open."""
    logger.warning(
        "ddpprobe: %d probes are open in this process. Each keeps its model, a thread and some "
        "descriptors until probe.close(): call it where the training of a model is over, or train "
        "in `with ddpprobe.install(model):`.",
        probes,
    )
