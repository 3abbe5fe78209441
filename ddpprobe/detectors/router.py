"""`router`: the experts of a layer are no longer chosen by what they are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.derived import expert_loads
from ddpprobe.records.step import Anomaly, StepRecord

FEWEST_EXPERTS = 3  # of two, one may well be for nearly everything
MOST_GROUPS = 256


@dataclass(slots=True)
class _Group:
    """What a group of experts has shown: its busiest one, and how long each has been idle."""

    busiest: str = ""
    since: int = 0
    looks: int = 0  # in a row at which it had nearly all
    told: dict[str, Telling] = field(default_factory=dict)  # by expert, how often it is told
    idle: dict[str, tuple[int, int]] = field(default_factory=dict)  # expert: since, looks
    told_idle: bool = False


class Router(SoundStepsDetector):
    """Warns of a layer in which one expert gets nearly all tokens, once for each expert.

    That most experts of a layer get none is an information: without a loss that balances them it
    happens in small jobs that learn well.

    Judged are modules in a list that is called `experts`, by the size of their outputs over all
    ranks. It must be the same expert, or the same ones, at each of the looks: in a small batch many
    get nothing by chance. Experts that are one tensor, and such as live on one rank each and are
    not numbered through, are not seen.

    Args:
        share: of a layer's tokens that is nearly all.
        looks: sampled steps in a row at which one expert must have had it.
        steps: steps for which it must have.
        idle: share of a layer's experts that is most.
        idle_looks: sampled steps for which these must have had nothing.
        quiet_steps: steps in which an expert does not get nearly all after which it is told again.
    """

    name = "router"
    title = "The experts are not chosen any more"

    def __init__(
        self, *, share: float = 0.95, looks: int = 8, steps: int = 20, idle: float = 0.5,
        idle_looks: int = 100, quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        above_zero(share=share, idle=idle)
        at_least(1, looks=looks, steps=steps, idle_looks=idle_looks)
        at_least(0, quiet_steps=quiet_steps)
        self._share, self._looks, self._steps, self._quiet = share, looks, steps, quiet_steps
        self._idle, self._idle_looks = idle, idle_looks
        self._reset()

    def _reset(self) -> None:
        self._groups: dict[str, _Group] = {}

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly for each group of experts."""
        if record.skipped or record.missing:
            return []
        found = []
        for fqns, load in expert_loads(record):
            if len(fqns) < FEWEST_EXPERTS:
                continue
            layer = fqns[0].rpartition(".")[0]
            if layer not in self._groups and len(self._groups) >= MOST_GROUPS:
                continue
            group = self._groups.setdefault(layer, _Group())
            said = self._of_one(record, group, fqns, load) or self._of_many(
                record, group, layer, fqns, load
            )
            found += [said] if said else []
        return found

    def _of_one(
        self, record: StepRecord, group: _Group, fqns: tuple[str, ...], load: Floats
    ) -> Anomaly | None:
        busiest, share = fqns[int(load.argmax())], float(load.max() / load.sum())
        if share < self._share or busiest != group.busiest:
            group.looks = 0
        if share >= self._share:
            group.since = group.since if group.looks else record.step
            group.busiest, group.looks = busiest, group.looks + 1
        long = group.looks >= self._looks and record.step - group.since >= self._steps
        if not long or not group.told.setdefault(busiest, Telling(self._quiet)).due(record.step):
            return None
        message = (
            f"{busiest} has got {share:.0%} of what the {len(fqns)} experts of its layer are given "
            f"since step {group.since}: look at the weights of the router, and at "
            "the loss that is to balance it"
        )
        values = {"share": share, "since": group.since, "experts": len(fqns)}
        return self.anomaly(
            record, "warn", message, values, module=busiest, kind="output", phase="forward"
        )

    def _of_many(
        self, record: StepRecord, group: _Group, layer: str, fqns: tuple[str, ...],
        load: Floats,
    ) -> Anomaly | None:  # fmt: skip
        for fqn, got in zip(fqns, load, strict=True):
            since, looks = group.idle.pop(fqn, (record.step, 0))
            if got == 0:
                group.idle[fqn] = since, looks + 1
        gone = [since for since, looks in group.idle.values() if looks >= self._idle_looks]
        if len(gone) <= self._idle * len(fqns):
            group.told_idle = False
            return None
        if group.told_idle:
            return None
        group.told_idle = True
        message = (
            f"{len(gone)} of the {len(fqns)} experts in {layer} have got nothing since step "
            f"{max(gone)}: they do not learn; look at the router, and at the loss that balances it"
        )
        values = {"idle": len(gone), "since": max(gone), "experts": len(fqns)}
        return self.anomaly(
            record, "info", message, values, module=layer, kind="output", phase="forward"
        )
