"""Who waits for the script's own `install()`: `ddpprobe run`, which then leaves it to that."""

from __future__ import annotations

from collections.abc import Callable

_waiting: list[Callable[[], object]] = []


def when_installed(act: Callable[[], object]) -> None:
    """Have `act` called once, as the script's next call of `install()` begins."""
    _waiting.append(act)


def announce_install() -> None:
    """Tell whoever waits that the script calls for a probe itself."""
    while _waiting:
        _waiting.pop()()
