"""Whatever breaks in ddpprobe, training ends as it would alone: same exit, same bits, same time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.replay.verify import verify

SABOTAGE = Path(__file__).with_name("sabotage.py")
STEPS = 60
TINY = ("--steps", STEPS, "--every", 2, "--micros", 1, "--sleep", 0.01)
DISK_BYTES = 600_000


def hashes(launched) -> list[str]:
    return [json.loads((launched.directory / f"hash.{r}").read_text()) for r in (0, 1)]


@pytest.fixture
def train(launch):
    """Run the small job, broken in one way, to its end."""

    def run(name: str, how: str = "nothing", *more: object, **options):
        hashed = launch(name, how, "--steps", 1, script=SABOTAGE, **options) if False else None
        assert hashed is None
        return launch(name, how, *TINY, *more, script=SABOTAGE, **options)

    return run
