"""Dead ranks as anomalies."""

from __future__ import annotations

from dataclasses import replace

from ddpprobe import heartbeat
from ddpprobe.detectors.suite import follows
from ddpprobe.records import Anomaly
from ddpprobe.replay.overlay import Overlay
from ddpprobe.replay.summary import Death, deaths_of

RANK_LOST = "rank_lost"
_PHASES = {"forward": "forward", "backward": "backward"}


def rank_losses(overlay: Overlay, attempt: int, found: list[Anomaly]) -> list[Anomaly]:
    """Return one anomaly for every death; the first one is a page.

    Args:
        overlay: the run.
        attempt: of which attempt.
        found: what the detectors found in it: a death that follows from that is no first cause.
    """
    causes = [a for a in found if a.first_cause]
    deaths = deaths_of(attempt, overlay.events(attempt))
    lost = [_rank_lost(overlay, death, deaths[0].rank) for death in deaths]
    return [
        replace(a, first_cause=a.level == "page" and not any(follows(a, c) for c in causes))
        for a in lost
    ]


def _rank_lost(overlay: Overlay, death: Death, first: int) -> Anomaly:
    beat = heartbeat.read(overlay.run.heartbeat(death.attempt, death.node, death.rank))
    where = f"in step {death.step}" if death.step >= 0 else "before its first step"
    after = "" if death.first else f", after rank {first}"
    return Anomaly(
        detector=RANK_LOST,
        level="page" if death.first else "info",
        step=max(death.step, 0),
        micro=beat.micro if beat else 0,
        rank=death.rank,
        module=None,
        kind=None,
        phase=_PHASES.get(beat.state if beat else "", "step"),
        first_cause=False,
        message=f"rank {death.rank} died ({death.signal}) {where}{after}",
        values={},
        sampled=False,
        attempt=death.attempt,
        wall_time_ns=death.time_ns,
    )
