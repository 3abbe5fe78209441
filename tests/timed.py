"""Detectors that judge seconds: on a busy machine what they say of healthy ranks may be true."""

from __future__ import annotations

from collections.abc import Iterable

from ddpprobe.detectors.slowdown import Slowdown
from ddpprobe.detectors.straggler import Straggler
from ddpprobe.records.step import Anomaly

TIMED = frozenset({Slowdown.name, Straggler.name})


def untimed(found: Iterable[Anomaly]) -> list[Anomaly]:
    """Leave out what depends on the speed of the machine."""
    return [anomaly for anomaly in found if anomaly.detector not in TIMED]
