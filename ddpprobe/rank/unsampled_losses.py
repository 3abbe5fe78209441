"""The losses of steps that are not sampled, kept until the next record can take them along."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.sweep import is_plain
from ddpprobe.records.every_loss import name_of

FULL = 64  # losses after which they are to be taken, so that a record's names stay few
MOST = 2 * FULL


@dataclass(slots=True)
class _Loss:
    """The mean of a step's losses so far; `cell`, [] on its device, has their sum instead."""

    step: int
    logged: bool
    count: int
    total: float
    cell: Tensor | None


@final
class UnsampledLosses:
    """Keeps one number a step. What the host can read it reads at once, the rest stays there."""

    def __init__(self) -> None:
        self._kept: list[_Loss] = []
        self._cells: dict[torch.device, tuple[Tensor, ...]] = {}
        self._next = 0

    @property
    def full(self) -> bool:
        """Whether they are to be taken."""
        return len(self._kept) >= FULL

    def add(self, step: int, value: Tensor | float, *, logged: bool) -> None:
        """Take a loss of a step, or of a micro-batch of it: they are averaged.

        Args:
            step: not smaller than that of the one before.
            value: a number, or a tensor with one element.
            logged: the script told it; one that the model returned is not averaged with it.
        """
        far = None
        if isinstance(value, Tensor):
            if not is_plain(value) or value.numel() != 1:
                return
            if lanes.is_near(value.device):
                value = value.item()
            else:
                far, value = value.detach().view(()), 0.0
        last = self._kept[-1] if self._kept else None
        if last is not None and (last.step, last.logged) == (step, logged):
            last.count += 1
            last.total += value
            if far is not None and last.cell is not None:
                last.cell.add_(far)
            return
        if len(self._kept) == MOST:
            del self._kept[0]
        cell = self._cell(far) if far is not None else None
        self._kept.append(_Loss(step, logged, 1, value, cell))

    def of(self, step: int) -> float | None:
        """Return the loss of the step under way; None: it is on a device, or not told yet."""
        last = self._kept[-1] if self._kept else None
        if last is None or last.step != step or last.cell is not None:
            return None
        return last.total / last.count

    def forget(self, step: int) -> None:
        """Drop what the model has returned in `step` so far: it was another model's."""
        if self._kept and self._kept[-1].step == step and not self._kept[-1].logged:
            del self._kept[-1]

    def has_logged(self, step: int) -> bool:
        """Whether the user has logged one in this step, the last one."""
        return bool(self._kept) and self._kept[-1].step == step and self._kept[-1].logged

    def take(self, step: int, rows: StepRows) -> dict[str, float]:
        """Empty it for the record of a step.

        What is on a device goes into `rows`. Returns the others by name.
        """
        told = {loss.step for loss in self._kept if loss.logged}
        facts: dict[str, float] = {}
        far: dict[torch.device, dict[str, Tensor]] = {}
        for loss in self._kept:
            if loss.step in told and not loss.logged:
                continue
            name, cell = name_of(step - loss.step), loss.cell
            if cell is None:
                facts[name] = loss.total / loss.count
            else:
                mean = cell if loss.count == 1 else cell / loss.count
                far.setdefault(cell.device, {})[name] = mean
        for found in far.values():
            rows.add_scalars([*found], torch.stack([*found.values()]))
        self._kept.clear()
        return facts

    def has_bad(self) -> bool:
        """Whether one is not finite; waits for the device: only at the end of a run."""
        sums = [loss.total for loss in self._kept]
        far: dict[torch.device, list[Tensor]] = {}
        for loss in self._kept:
            if loss.cell is not None:
                far.setdefault(loss.cell.device, []).append(loss.cell)
        for device, cells in far.items():
            lane, values = lanes.lane_of(device), torch.stack(cells)
            host = lane.room(values.shape, values.dtype)
            lane.fence()
            arrival = lane.send(values, host)
            if arrival is not None:
                arrival.synchronize()
            sums += host.tolist()
        return not all(map(math.isfinite, sums))

    def _cell(self, value: Tensor) -> Tensor:
        cells = self._cells.get(value.device)
        if cells is None:
            room = torch.zeros(MOST, dtype=torch.float64, device=value.device)
            cells = self._cells[value.device] = room.unbind()
        cell = cells[self._next % MOST]
        self._next += 1
        return cell.copy_(value, non_blocking=True)
