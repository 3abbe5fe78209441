"""What every site must show: the unsharded model in one process, seen by plain torch hooks.

One replica per data-parallel rank sees that rank's batches; gradients are averaged by hand. Nothing
of ddpprobe is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.grid.axes import DDP, FSDP1, Cell
from tests.grid.loops import BACKOFF, LR, SCALE, STEPS, autocast, branch_of, make_optimizers
from tests.grid.models import Base, batch, build, loss_of
from tests.site_values import Expected, GradientHook, Key, OutputHook


@dataclass
class Replica:
    """The model of one data-parallel rank. Under MixedPrecision `masters` are its fp32 weights."""

    model: Base
    rank: int
    masters: list[Tensor]
    optimizers: list[torch.optim.Optimizer]
    scale: float = SCALE


class Reference:
    """Trains a cell's model without any wrapper and notes what passes every site."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._now = Expected()
        self._chosen: set[str] = set()  # names of the parameters that are trained
        self._replicas = [self._replica(rank) for rank in range(cell.dp)]

    def run(self) -> list[Expected]:
        """All steps."""
        steps = []
        if self.cell.install == "late":
            self._warm_up()
        for number in range(STEPS):
            self._now = Expected(scale=self.loss_scale(self._replicas[0]))
            if self.cell.loop == "lbfgs":
                self._lbfgs(number)
            else:
                for micro in range(self.cell.micros):
                    if micro == 0 or self.cell.loop != "no-sync":
                        self._broadcast_buffers()
                    for replica in self._replicas:
                        self._pass(replica, number, micro)
                    if self.cell.loop == "eval":
                        self._broadcast_buffers()
                self._reduce()
                self._step()
            steps.append(self._now)
        return steps

    def _warm_up(self) -> None:
        """A forward and backward that trains nothing, and moves running statistics all the same."""
        self._broadcast_buffers()
        for replica in self._replicas:
            self._pass(replica, 0, 0)
            _clear(replica)

    def _broadcast_buffers(self) -> None:
        """DDP does so before a forward, unless the one before it was within `no_sync`."""
        if self.cell.wrapper in DDP:
            lead, *others = (list(replica.model.buffers()) for replica in self._replicas)
            for other in others:
                for mine, theirs in zip(other, lead, strict=True):
                    mine.copy_(theirs)

    def parameters(self) -> dict[str, Tensor]:
        """The first replica's parameters as they are now."""
        lead = self._replicas[0]
        names = [name for name, _ in lead.model.named_parameters()]
        return {n: p.detach().clone() for n, p in zip(names, lead.masters, strict=True)}

    def _replica(self, rank: int) -> Replica:
        model = build(self.cell.model, inplace=self.cell.inplace)
        masters = list(model.parameters())
        if self.cell.precision == "mixed":
            masters = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in masters]
            model.to(torch.bfloat16)
        trained = [p for p in masters if p.requires_grad]
        self._chosen = {name for name, p in model.named_parameters() if p.requires_grad}
        if self.cell.wrapper in FSDP1:  # a flat parameter needs its gradient as a whole, so that
            model.requires_grad_(True)  # the outputs of frozen modules have one, too
        optimizers = [] if self.cell.loop == "no-optimizer" else make_optimizers(self.cell, trained)
        replica = Replica(model, rank, masters, optimizers)

        def see(key: Key, tensor: Tensor) -> None:
            scaled = key[1] in ("grad_output", "grad_local")
            self.see(key, tensor, self.loss_scale(replica) if scaled else 1.0)

        for name, module in model.named_modules():
            module.register_forward_hook(OutputHook(see, self.tap, name))
        for name, parameter in model.named_parameters():
            if name in self._chosen:
                parameter.register_hook(GradientHook(see, (name, "grad_local", "")))
        return replica

    def see(self, key: Key, tensor: Tensor, scale: float = 1.0) -> None:
        """Keep what a hook was given."""
        self._now.see(key, tensor, scale)

    def tap(self, key: Key) -> None:
        """Note that a hook was placed."""
        self._now.tap(key)

    def loss_scale(self, replica: Replica) -> float:
        """What the loss of this backward is multiplied with."""
        return replica.scale if self.cell.precision == "scaler" else 1.0

    def _pass(self, replica: Replica, number: int, micro: int) -> Tensor:
        even = self.cell.wrapper == "pp"
        data = batch(self.cell.model, number, micro, replica.rank, even=even)
        if self.cell.precision == "mixed" and data.is_floating_point():
            data = data.bfloat16()
        replica.model.branch = branch_of(replica.rank, micro)
        with autocast(self.cell):
            loss = loss_of(replica.model(data))
        (loss * self.loss_scale(replica)).backward()
        if self.cell.wrapper in FSDP1 and self.cell.model == "branches":
            # A flat parameter's gradient is whole: what did not run has a gradient, of zeros.
            for name, parameter in replica.model.named_parameters():
                if name.startswith(f"blocks.{1 - replica.model.branch}."):
                    self.see((name, "grad_local", ""), torch.zeros_like(parameter))
        last = micro == self.cell.micros - 1
        if self.cell.precision == "mixed" and (last or not self._accumulates_low()):
            for master, parameter in zip(replica.masters, replica.model.parameters(), strict=True):
                if parameter.grad is not None:
                    held = 0.0 if master.grad is None else master.grad
                    master.grad = held + parameter.grad.float()
                    parameter.grad = None
        return loss.detach()

    def _accumulates_low(self) -> bool:
        """FSDP1 adds up micro-batches in bf16 within no_sync; else they are added in float32."""
        return self.cell.wrapper in FSDP1 and self.cell.loop == "no-sync"

    def _reduce(self) -> None:
        names = [name for name, _ in self._replicas[0].model.named_parameters()]
        alone = self.cell.wrapper == "plain"
        for index, name in enumerate(names):
            held = [replica.masters[index].grad for replica in self._replicas]
            if name not in self._chosen:
                for replica in self._replicas:
                    replica.masters[index].grad = None
                continue
            if all(g is None for g in held):
                continue
            key = (name, "grad", "")
            if alone:
                for replica, g in zip(self._replicas, held, strict=True):
                    if g is not None:
                        self.see(key, g, self.loss_scale(replica))
                continue
            zero = torch.zeros_like(replica_like(held))
            total = sum(((zero if g is None else g) / self.cell.dp for g in held[1:]),
                        (zero if held[0] is None else held[0]) / self.cell.dp)  # fmt: skip
            for replica in self._replicas:
                replica.masters[index].grad = total.clone()
            self.see(key, total, self.loss_scale(self._replicas[0]))

    def _step(self) -> None:
        for replica in self._replicas:
            scale = self.loss_scale(replica)
            grads = [p.grad for p in replica.masters if p.grad is not None]
            if self.cell.precision == "scaler":
                if not all(torch.isfinite(g).all() for g in grads):
                    self._now.skipped = True
                    replica.scale *= BACKOFF
                    _clear(replica)
                    continue
                for gradient in grads:
                    gradient.div_(scale)
            before = [master.detach().clone() for master in replica.masters]
            for optimizer in replica.optimizers:
                optimizer.step()
            if self.cell.loop == "no-optimizer":
                with torch.no_grad():
                    for master in replica.masters:
                        if master.grad is not None:
                            master.sub_(master.grad, alpha=LR)
            if replica is self._replicas[0] or self.cell.wrapper == "plain":
                self._see_weights(replica, before)
            self._see_buffers(replica)
            _clear(replica)
            _publish(replica)

    def _see_buffers(self, replica: Replica) -> None:
        for name, buffer in replica.model.named_buffers():
            if buffer.is_floating_point():
                self.see((name, "buffer", ""), buffer)

    def _see_weights(self, replica: Replica, before: list[Tensor]) -> None:
        """Keep the weights after the step, and what it has changed of them."""
        names = [name for name, _ in replica.model.named_parameters()]
        for name, old, new in zip(names, before, replica.masters, strict=True):
            if name in self._chosen:
                self.see((name, "param", ""), new)
                self.see((name, "update", ""), new.detach() - old)

    def _lbfgs(self, number: int) -> None:
        """One optimizer for the job: here the first replica's (plain: each has its own)."""
        alone = self.cell.wrapper == "plain"
        for lead in self._replicas if alone else self._replicas[:1]:
            self._lead(lead, number, [lead] if alone else self._replicas)

    def _lead(self, lead: Replica, number: int, team: list[Replica]) -> None:
        reduced: dict[str, Tensor] = {}  # of the last call of the closure

        def closure() -> Tensor:
            for replica in team:
                for mine, theirs in zip(lead.masters, replica.masters, strict=True):
                    theirs.data.copy_(mine.data)
                _clear(replica)
            losses = [self._pass(replica, number, 0) for replica in team]
            names = [name for name, _ in lead.model.named_parameters()]
            for index, name in enumerate(names):
                held = [replica.masters[index].grad for replica in team]
                if held[0] is None:
                    continue
                lead.masters[index].grad = sum(g / len(team) for g in held)
                reduced[name] = lead.masters[index].grad.clone()
            return sum(losses) / len(losses)

        before = [master.detach().clone() for master in lead.masters]
        lead.optimizers[0].step(closure)
        self._see_weights(lead, before)
        for name, gradient in reduced.items():
            self.see((name, "grad", ""), gradient)
        for replica in team:
            for mine, theirs in zip(lead.masters, replica.masters, strict=True):
                theirs.data.copy_(mine.data)
            self._see_buffers(replica)
            _clear(replica)


def replica_like(held: list[Tensor | None]) -> Tensor:
    """Any of the gradients that is there."""
    return next(g for g in held if g is not None)


def _clear(replica: Replica) -> None:
    for parameter in (*replica.masters, *replica.model.parameters()):
        parameter.grad = None


def _publish(replica: Replica) -> None:
    """Give the model its masters' values (they are the same tensors in full precision)."""
    with torch.no_grad():
        for master, parameter in zip(replica.masters, replica.model.parameters(), strict=True):
            if master is not parameter:
                parameter.copy_(master)
