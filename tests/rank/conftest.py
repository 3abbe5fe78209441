"""What tests of the training process share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ddpprobe.rank.signal_handlers import OF_THE_SCRIPT


@pytest.fixture
def python_s_own_handlers() -> Iterator[None]:
    """A process of Python's own handlers, whatever was tested in this one before."""
    own = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    OF_THE_SCRIPT.release()
