"""The end of an attempt as anomalies, beside what the detectors found."""

from __future__ import annotations

from ddpprobe.ends.anomalies import RANK_LOST, anomalies_of
from ddpprobe.reader.endings import Ending
from ddpprobe.records.step import Anomaly


def rank_losses(ending: Ending, found: list[Anomaly]) -> list[Anomaly]:
    """Return what the end of an attempt is worth telling; see `ends.anomalies`.

    Args:
        ending: of the attempt.
        found: what the detectors found in it: an end that follows from that is no first cause.
    """
    causes = [a for a in found if a.first_cause and a.detector != RANK_LOST]
    return anomalies_of(ending.end, ending.case, ending.attempt, causes)
