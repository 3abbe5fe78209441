"""Trains a model with the probe on one rank: healthy, then once with each of some faults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ddpprobe
from ddpprobe.testing import Fault, inject
from tests.models.training import Architecture, Trained, Training

logging.getLogger("ddpprobe.testing").setLevel(logging.ERROR)  # of each fault that happens
HEALTHY = "healthy"  # the run beside those of the faults, which are named by their phase


@dataclass
class Probed:
    """What came of it on this rank; `fired`: the faults that happened, by their phase."""

    trained: Trained
    fired: dict[str, bool]


def train(
    architecture: Architecture, rank: int, directory: Path, faults: Mapping[str, Fault]
) -> Probed:
    """Train; each run is a directory below `directory`."""
    training = Training(architecture, rank)
    with _install(training, directory / HEALTHY):
        trained = training.run()
    fired = {}
    for phase, fault in faults.items():
        training = Training(architecture, rank)
        with _install(training, directory / phase), inject(training.called, fault) as planted:
            training.run(fault.step + 1)
            fired[phase] = planted.fired
    return Probed(trained, fired)


def _install(training: Training, run_dir: Path) -> ddpprobe.Probe:
    return ddpprobe.install(training.called, run_dir=run_dir, every=1, daemon="none")
