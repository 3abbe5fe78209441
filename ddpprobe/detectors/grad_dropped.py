"""`grad_dropped`: gradients are computed, and thrown away before an optimizer takes them."""

from __future__ import annotations

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.subtrees import named
from ddpprobe.records.step import DROPPED, UNREGISTERED, Anomaly, StepRecord


class GradDropped(SampledDetector):
    """Warns, once, of gradients that are computed at each step and that no optimizer gets.

    A `zero_grad` before each micro-batch of a step, where it belongs before the first: only the
    last one is trained with. Or modules in a Python list (or tuple, or dict) of the model, which
    torch does not register: they take part in the forward, have gradients, and are in no optimizer.

    Args:
        times: that gradients must be thrown away within a step; once or twice may be meant (a
            second pass after a first one that only moved the weights).
        looks: sampled steps in a row at which it must be so,
        steps: and so many steps.
    """

    name = "grad_dropped"
    title = "Gradients are thrown away"

    def __init__(self, *, times: int = 3, looks: int = 4, steps: int = 20) -> None:
        at_least(1, times=times, looks=looks, steps=steps)
        self._times, self._looks, self._steps = times, looks, steps
        self._reset()

    def _reset(self) -> None:
        self._since: dict[str, tuple[int, int]] = {}  # rule: step of the first look, looks
        self._told: set[str] = set()

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly of each rule."""
        if record.skipped:
            return []
        times = largest(record, DROPPED)
        paths = self._unregistered(record)
        found = []
        if self._lasts(record.step, DROPPED, there=times >= self._times):
            message = (
                f"gradients were thrown away {times:.0f} times within each step since step "
                f"{self._since[DROPPED][0]}, before any optimizer took them. Unless the script "
                "uses them (an attack on the inputs), zero_grad belongs before the first "
                "micro-batch of a step, and not before each"
            )
            found.append(self.anomaly(record, "warn", message, {"times": times}, phase="backward"))
        if self._lasts(record.step, UNREGISTERED, there=bool(paths)):
            count = sum(paths.values())
            message = (
                f"{count:.0f} parameters in {named(list(paths))} have gradients and no optimizer: "
                "torch does not know modules in a Python list, tuple or dict. Use nn.ModuleList or "
                "nn.ModuleDict, or freeze them"
            )
            values = {"parameters": count}
            module = min(paths)
            found.append(
                self.anomaly(record, "warn", message, values, module=module, phase="backward")
            )
        return found

    def _lasts(self, step: int, rule: str, *, there: bool) -> bool:
        """Whether it is time to tell of a rule, which holds at this look or does not."""
        if not there:
            self._since.pop(rule, None)
            return False
        since, looks = self._since.get(rule, (step, 0))
        self._since[rule] = since, looks + 1
        due = step - since >= self._steps and looks + 1 >= self._looks and rule not in self._told
        if due:
            self._told.add(rule)
        return due

    @staticmethod
    def _unregistered(record: StepRecord) -> dict[str, float]:
        """Return how many parameters there are by the path of the attribute, on any rank."""
        counts: dict[str, float] = {}
        for said in record.scalars.values():
            for name, number in said.items():
                if name.startswith(UNREGISTERED):
                    path = name.removeprefix(UNREGISTERED)
                    counts[path] = max(counts.get(path, 0.0), float(number))
        return counts
