"""All jobs by name, and the groups of them that the page shows apart."""

from __future__ import annotations

from benchmarks.detection.breadth import BREADTH
from benchmarks.detection.faults import FAULTS, Fault
from benchmarks.detection.habits import HABITS
from benchmarks.detection.habits_blind import HABITS_BLIND
from benchmarks.detection.habits_blind_three import HABITS_BLIND_THREE
from benchmarks.detection.habits_blind_two import HABITS_BLIND_TWO
from benchmarks.detection.healthy import HEALTHY, Healthy
from benchmarks.detection.sharded import SHARDED
from benchmarks.detection.training import Training
from benchmarks.detection.unlisted import UNLISTED
from benchmarks.detection.zoo import ZOO

PLANTED: dict[str, type[Fault]] = {**FAULTS, **UNLISTED, **SHARDED}
_BLIND = {**HABITS_BLIND, **HABITS_BLIND_TWO, **HABITS_BLIND_THREE}
QUIET: dict[str, type[Healthy]] = {**HEALTHY, **BREADTH, **HABITS, **_BLIND, **ZOO}
APART = {*UNLISTED, *SHARDED, *BREADTH, *HABITS, *_BLIND, *ZOO}  # not in the table of rivals
JOBS: dict[str, type[Training]] = {**PLANTED, **QUIET}
