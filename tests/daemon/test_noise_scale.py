"""The head's gradient noise scale is that of all steps before, also after a daemon that died."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.detectors.suite import default_suite
from ddpprobe.records.derived import NOISE_WINDOW, NoiseScale
from ddpprobe.records.step import Site, StepRecord

from ..detectors.made_records import record

SIZE = 50
SITES = Site("fc.weight", "grad_local"), Site("fc.weight", "grad", placement="replicated")


def step(number: int, rng: np.random.Generator) -> StepRecord:
    """Two ranks' gradients of one weight, and their mean."""
    own = 1 + rng.normal(size=(2, SIZE))
    mean = own.mean(axis=0)
    said = {
        r: {"grad_norm_local": float(np.linalg.norm(g)), "grad_norm": float(np.linalg.norm(mean))}
        for r, g in enumerate(own)
    }
    rows = {
        SITES[0]: {"numel": 2 * SIZE, "sum_sq": float((own * own).sum())},
        SITES[1]: {"numel": SIZE, "sum_sq": float(mean @ mean)},
    }
    return record(number, said, rows)


def test_a_daemon_that_goes_on_has_the_noise_scale_of_all_steps(tmp_path: Path) -> None:
    rng, fold = np.random.default_rng(0), NoiseScale()
    meta = {"role": "daemon", "head": True}
    first = DaemonJournal(tmp_path, meta, default_suite())
    for number in range(NOISE_WINDOW + 3):
        each = step(number, rng)
        fold.update(each)
        first.take(each)
    first.close()
    assert fold.now is not None
    assert first.noise_scale.now == fold.now
    again = DaemonJournal(tmp_path, meta, default_suite())
    again.close()
    assert again.noise_scale.now == fold.now
