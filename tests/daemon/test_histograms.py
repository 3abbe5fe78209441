"""A daemon shows the histograms of its run in /metrics when it is asked for them, and only then."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddpprobe.records.histogram import BINS

from ..distributed import daemon_harness
from ..made_runs import Made, record
from ..waiting import PATIENCE

BUCKETS = 'ddpprobe_site_magnitude_bucket{fqn="blocks.1.mlp",kind="output",le='


@pytest.mark.parametrize("asked", [True, False])
def test_histograms_are_in_the_metrics_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setenv("DDPPROBE_HISTOGRAMS", str(int(asked)))
    bins = np.zeros((1, BINS), np.int64)
    bins[0, [30, 100]] = 5, 7
    with daemon_harness.harness(tmp_path) as job:
        made = Made(job.run.path, ranks=1, pid=os.getpid())
        for step in range(5):
            made.write([replace(_whole(record(0, step)), binned=np.array([1]), bins=bins)])
        daemon = job.daemon()
        daemon_harness.wait(lambda: 'ddpprobe_loss{rank="0"} 0.2' in job.metrics())
        if asked:
            daemon_harness.wait(lambda: f'{BUCKETS}"+Inf"}} 60.0' in job.metrics())
            assert f'{BUCKETS}"16.0"}} 60.0' in job.metrics()
            assert f'{BUCKETS}"0.0625"}} 25.0' in job.metrics()
        else:
            assert BUCKETS not in job.metrics()
        made.close()
        assert daemon.wait(30 * PATIENCE) == 0


def _whole(made):
    """Return the record with 12 elements at its second site, all of them in bins."""
    counts = made.counts.copy()
    counts[1, :5] = 12, 0, 0, 0, 0
    return replace(made, counts=counts)
