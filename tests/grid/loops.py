"""Three training steps as a cell's user would write them, and two more that carry a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.grid.axes import FSDP1, FSDP2, Cell
from tests.grid.models import batch, loss_of
from tests.grid.wrapping import Wrapped, local, spots, stage_of

STEPS = 3  # compared; then the faults:
FORWARD_STEP, BACKWARD_STEP = 3, 4
LR = 0.01
SCALE, BACKOFF = 2.0**40, 2.0**-36  # the first step overflows fp16, the second does not


@dataclass(frozen=True)
class Planned:
    """Where the NaN is born: on this rank, in this micro-batch (in all, of a pipeline)."""

    rank: int
    micro: int


def planned(cell: Cell) -> Planned:
    """The fault of a cell: fixed, but another one in each."""
    micro = cell.choice("micro", cell.micros)
    if cell.wrapper == "pp":
        return Planned(stage_of("blocks.1", cell.ranks), 0)
    return Planned(cell.choice("rank", cell.ranks), micro)


@dataclass
class Loop:
    """One training run of one cell on this rank."""

    wrapped: Wrapped
    end_step: Callable[[], None] = lambda: None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cell = self.wrapped.cell
        parameters = [p for p in self.wrapped.model.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(self.cell, parameters)
        self.scaler = self._scaler() if self.cell.precision == "scaler" else None
        self.schedule = self._schedule() if self.cell.wrapper == "pp" else None

    def _scaler(self) -> torch.amp.GradScaler:
        options = {"init_scale": SCALE, "backoff_factor": BACKOFF, "growth_interval": 10_000}
        if self.cell.wrapper in FSDP1:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            return ShardedGradScaler("cpu", **options)
        return torch.amp.GradScaler("cpu", **options)

    def _schedule(self) -> ScheduleGPipe:
        stage = PipelineStage(
            self.wrapped.model, self.wrapped.rank, self.cell.ranks, torch.device("cpu")
        )
        loss = lambda output, _: loss_of(output)  # noqa: E731
        return ScheduleGPipe(stage, self.cell.micros, loss, scale_grads=False)

    def warm_up(self) -> None:
        """One forward and backward that trains nothing: the model is compiled by it."""
        self._pass(batch(self.cell.model, 0, 0, self.wrapped.dp_rank, even=self._even), True)
        self._zero()

    @property
    def _even(self) -> bool:
        return self.cell.wrapper == "pp"

    def step(self, number: int) -> None:
        """One optimizer step, with its micro-batches and, if the cell says so, eval passes."""
        faulty = number >= STEPS
        kept = [local(p).clone() for p in self.wrapped.model.parameters()] if faulty else []
        if self.schedule is not None:
            with self._fault(number, 0):
                self._pipeline(number)
            self._optimize()
        elif self.cell.loop == "lbfgs":
            self._lbfgs(number)
        else:
            for micro in range(self.cell.micros):
                self._micro(number, micro)
                if self.cell.loop == "eval" and self.cell.wrapper not in FSDP1:
                    self._evaluate(number)  # FSDP1 would go on with this pass's weights
            self._optimize()
        self._zero()
        # After an eval pass FSDP1's parameters are whole: what was kept would not fit them.
        if self.cell.loop == "eval" and not (self.cell.wrapper in FSDP1 and number >= STEPS - 1):
            self._evaluate(number)
        with torch.no_grad():
            for parameter, value in zip(self.wrapped.model.parameters(), kept, strict=False):
                local(parameter).copy_(value)

    def _micro(self, number: int, micro: int) -> Tensor:
        data = batch(self.cell.model, number, micro, self.wrapped.dp_rank)
        self.wrapped.root.branch = branch_of(self.wrapped.rank, micro)
        last = micro == self.cell.micros - 1 or self.cell.loop != "no-sync"
        with self._fault(number, micro):
            return self._pass(data, last)

    def _pass(self, data: Tensor, last: bool) -> Tensor:
        if self.schedule is not None:
            return self._pipeline(0)
        with self.wrapped.syncing(last):
            with autocast(self.cell):
                loss = loss_of(self.wrapped.model(data))
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def _pipeline(self, number: int) -> Tensor:
        parts = [
            batch(self.cell.model, number, m, 0, even=True) for m in range(self.cell.micros)
        ]  # fmt: skip
        data, last = torch.cat(parts), self.wrapped.rank == self.cell.ranks - 1
        given = (data,) if self.wrapped.rank == 0 else ()
        return self.schedule.step(*given, **({"target": data} if last else {}))

    def _lbfgs(self, number: int) -> None:
        micro = iter(range(1000))

        def closure() -> Tensor:
            self._zero()
            data = batch(self.cell.model, number, 0, self.wrapped.dp_rank)
            with self._fault(number, next(micro)):
                return self._pass(data, True)

        self.optimizers[0].step(closure)

    def _optimize(self) -> None:
        if self.cell.loop == "no-optimizer":
            with torch.no_grad():
                for parameter in self.wrapped.model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=LR)
            self.end_step()
            return
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def _zero(self) -> None:
        self.wrapped.model.zero_grad(set_to_none=True)

    def _evaluate(self, number: int) -> None:
        self.wrapped.model.eval()
        with torch.no_grad(), autocast(self.cell):
            self.wrapped.model(batch(self.cell.model, number, 7, self.wrapped.dp_rank))
        if self.cell.wrapper in FSDP2:
            self.wrapped.model.reshard()  # or the next forward computes with this one's weights
        self.wrapped.model.train()

    @contextlib.contextmanager
    def _fault(self, number: int, micro: int) -> Iterator[None]:
        plan = planned(self.cell)
        hit = number >= STEPS and (plan.rank, plan.micro) == (self.wrapped.rank, micro)
        found = spots(self.wrapped, self.wrapped.root.spot) if hit else []
        name = "add" if number == FORWARD_STEP else "factor"
        for spot in found:
            setattr(spot, name, torch.tensor(float("nan")))
        yield
        for spot in found:
            setattr(spot, name, torch.tensor(0.0 if name == "add" else 1.0))


def make_optimizers(cell: Cell, parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers of a cell: what it trains with is the same in the reference."""
    if cell.loop == "lbfgs":
        return [
            torch.optim.LBFGS(
                parameters, lr=LR, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0
            )
        ]
    momentum = 0.0 if cell.model == "sparse" else 0.9
    if cell.loop == "two-optimizers" and len(parameters) > 1:
        half = len(parameters) // 2
        groups = [parameters[:half], parameters[half:]]
    else:
        groups = [parameters]
    return [torch.optim.SGD(group, lr=LR, momentum=momentum) for group in groups]


def autocast(cell: Cell) -> contextlib.AbstractContextManager[object]:
    """The user's autocast."""
    dtype = {"autocast": torch.bfloat16, "scaler": torch.float16}.get(cell.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def branch_of(rank: int, micro: int) -> int:
    """Which of its two blocks the branching model runs."""
    return (rank + micro) % 2
