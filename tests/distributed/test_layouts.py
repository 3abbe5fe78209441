"""Inside tensor parallelism a layout is proven or unknown; a value called replicated is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddpprobe.records.step import IN_TURN
from tests.distributed import layouts_job


def test_what_is_called_replicated_is_and_what_cannot_be_told_is_unknown(
    torchrun, tmp_path: Path, records_of
) -> None:
    done = torchrun([Path(layouts_job.__file__), tmp_path], nproc=2)
    assert done.returncode == 0, done.stderr
    placements = {}
    for run in sorted(tmp_path.iterdir()):
        if not (run / "run.json").exists():
            continue
        for ours, theirs in zip(records_of(run, 0), records_of(run, 1), strict=True):
            others = {site.key: i for i, site in enumerate(theirs.sites)}
            for i, site in enumerate(ours.sites):
                j = others[site.key]
                assert site.placement == theirs.sites[j].placement, (run.name, site)
                # Weights lie as declared. Whether replicas have parted ("foreign"), desync tells.
                if site.placement == "local" and site.kind not in IN_TURN:
                    assert (site.primary, theirs.sites[j].primary) == (True, False)
                    same = np.allclose(ours.values[i], theirs.values[j], rtol=1e-5, atol=1e-9)
                    assert same, (run.name, site)
                    assert (ours.counts[i] == theirs.counts[j]).all(), (run.name, site)
                placements[run.name, site.fqn, site.kind] = site.placement
    told = {key: placement for key, placement in placements.items() if key[2] == "output"}
    for kind in ("plain", "scatter", "foreign", "checkpoint"):
        assert told[kind, "block.inner.up", "output"] == "sharded"
        assert told[kind, "block.down", "output"] == "local"
        assert told[kind, "norm", "output"] == "local"
    assert told["plain", "block", "output"] == told["plain", "", "output"] == "local"
    assert told["plain", "block.inner", "output"] == "sharded"  # its consumer says so
    assert placements["plain", "block.inner.gate", "grad"] == "unknown"  # a sum over this half
    assert placements["plain", "norm.weight", "grad"] == "local"
    assert told["scatter", "scatter", "output"] == told["scatter", "head", "output"] == "unknown"
    assert told["foreign", "foreign", "output"] == told["foreign", "", "output"] == "unknown"
    # The root's inputs were not replicated after all: nothing concluded from that stands.
    for fqn, kind in (("norm", "output"), ("norm.weight", "grad_local"), ("norm.weight", "grad")):
        assert placements["split-input", fqn, kind] in ("unknown", "sharded"), fqn
