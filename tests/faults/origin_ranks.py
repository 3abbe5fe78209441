"""One planted origin, carried out: a small model that trains in one of three wrappers."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from tests import far
from tests.faults.origin_plans import EVERY, STEPS, Plan
from tests.faults.zygote import start_rank

WIDTH, MICROS, WAIT_SECONDS = 16, 2, 60


class _Poison(torch.autograd.Function):
    """The identity, whose gradient is spoilt."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _spoilt(grads[0], ctx.value), None


class _Fault:
    """The one fault of a run: what the modules below ask whether it is their turn."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.origin, self.rank = plan, plan.origin, rank
        self.value = float(plan.origin.value)
        self.step = self.micro = 0
        self.fired = False

    def is_due(self, kind: str, path: str = "") -> bool:
        """Whether this kind of fault is to happen here and now."""
        origin, plan = self.origin, self.plan
        lasting = origin.scaler and origin.kind == "forward" and self.step > plan.step
        when = lasting or (self.step == plan.step and self.micro == origin.micro)
        due = when and self.rank == plan.rank and (kind, path) == (origin.kind, origin.module)
        self.fired |= due
        return due

    def output(self, path: str, y: Tensor) -> Tensor:
        """Return what a module puts out, with what is planned for it."""
        if self.origin.then and self.fired and path != self.origin.module:
            self._react(y)
        if self.is_due("forward", path):
            return _spoilt(y, self.value)
        if self.is_due("autograd", path):
            return _Poison.apply(y, self.value)  # type: ignore[no-any-return]  # torch says Any
        if self.is_due("grad", path) or self.is_due("overflow", path):
            y = y.clone()
            y.register_hook(lambda grad: _spoilt(grad, self.value))
        return y

    def between(self, path: str, h: Tensor) -> Tensor:
        """Be a module's own code between two of its children."""
        if self.is_due("functional", path):
            return _spoilt(h, self.value)
        if self.is_due("between_inplace", path):
            _write(h.detach(), self.value)
        return h

    def _react(self, y: Tensor) -> None:
        """Do what scripts do in the forward that has gone bad."""
        match self.origin.then:
            case "raise":
                raise ValueError(f"expected finite values, got {y.detach().flatten()[0]}")
            case "exit":
                os._exit(1)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.fault.output(self.path, super().forward(x))  # type: ignore[operator, union-attr, no-any-return]  # set by _build


class _Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.fault.output(self.path, super().forward(x))  # type: ignore[operator, union-attr, no-any-return]  # set by _build


class _Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.fault.output(self.path, x.tanh())  # type: ignore[operator, union-attr, no-any-return]  # set by _build


class _Mask(nn.Module):
    """Adds -Inf above the diagonal, as attention does before its softmax."""

    def forward(self, x: Tensor) -> Tensor:
        above = torch.ones(x.shape, dtype=torch.bool).triu(1)
        return self.fault.output(self.path, x.masked_fill(above, -torch.inf))  # type: ignore[operator, union-attr, no-any-return]  # set by _build


class _Passing(nn.Module):
    """Returns its child's very tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.child = _Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.child(x)
        if self.fault.is_due("inplace", self.path):  # type: ignore[operator, union-attr]  # set by _build
            _write(y.detach(), self.fault.value)  # type: ignore[arg-type, union-attr]  # set by _build
        return y


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = _Norm(WIDTH), _Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = _Tanh(), _Linear(2 * WIDTH, WIDTH)
        self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fault.between(self.path, self.norm(x))  # type: ignore[operator, union-attr]  # set by _build
        h = self.down(self.act(self.up(h)))
        return self.fault.output(self.path, x + h * self.gain)  # type: ignore[operator, union-attr, no-any-return]  # set by _build


class _Net(nn.Module):
    def __init__(self, *, mask: bool) -> None:
        super().__init__()
        self.embed = _Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.wrap = _Passing()
        if mask:
            self.mask = _Mask()
        self.head = _Linear(WIDTH, 2)  # a row for each of two ranks

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        h = self.wrap(h)
        if hasattr(self, "mask"):
            h = h + self.mask(h @ h.T).softmax(-1) @ h
        loss: Tensor = self.head(h).square().mean()
        if self.fault.is_due("loss"):  # type: ignore[operator, union-attr]  # set by _build
            loss = loss * self.fault.value  # type: ignore[operator, union-attr]  # set by _build
        return loss


def _spoilt(x: Tensor, value: float) -> Tensor:
    own = x.clone()
    _write(own.detach(), value)
    return own


def _write(x: Tensor, value: float) -> None:
    x.view(-1)[::3] = value


def _build(plan: Plan, fault: _Fault) -> tuple[nn.Module, _Net]:
    """Return the wrapped model, and what is in it."""
    torch.manual_seed(0)
    model = _Net(mask=plan.origin.mask)
    for path, module in model.named_modules():
        module.path, module.fault = path, fault  # type: ignore[assignment]  # no parameters
    if plan.wrap == "fsdp2":
        for part in (*model.blocks, model):
            fully_shard(part)
    if plan.wrap != "ddp":
        return model, model
    wrapped = DistributedDataParallel(model)
    if plan.origin.kind == "reduction":
        wrapped.register_comm_hook(fault, _bad_reduction)
    return wrapped, model


def _bad_reduction(fault: _Fault, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce as DDP does; on the rank of the fault something goes bad on the way."""
    future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()

    def then(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        (reduced,) = done.value()
        return _spoilt(reduced, fault.value) if fault.is_due("reduction") else reduced

    return future.then(then)  # type: ignore[no-any-return]  # torch says Any


# DDP compares annotations with the classes, and refuses text, which these are in this file.
_bad_reduction.__annotations__["bucket"] = dist.GradBucket
_bad_reduction.__annotations__["return"] = torch.futures.Future[Tensor]


def _train(plan: Plan, rank: int, run: Path) -> None:
    """Be the user's script."""
    if plan.far:
        far.pretend_for_good()
    fault = _Fault(plan, rank)
    wrapped, model = _build(plan, fault)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    # Small enough to overflow only where it is planned.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=plan.origin.scaler)
    data = torch.Generator().manual_seed(rank)
    logs = plan.origin.kind == "logged_loss"
    with ddpprobe.install(wrapped, run_dir=run, every=EVERY, daemon="none") as probe:
        for fault.step in range(STEPS):
            fault.micro = plan.origin.micro  # for what happens outside of micro-batches
            _between_steps(fault, model, optimizer)
            for fault.micro in range(MICROS):
                x = torch.randn(8, WIDTH, generator=data)
                if fault.is_due("data"):
                    x = _spoilt(x, fault.value)
                loss = wrapped(x)
                if logs:
                    value = fault.value if fault.is_due("logged_loss") else 1.0
                    probe.log(loss=loss.detach() * value)
                if plan.origin.then == "skip" and not _is_fine(loss, plan):
                    break
                scaler.scale(loss).backward()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_fine(loss: Tensor, plan: Plan) -> bool:
    """Whether the loss is finite on all ranks; they must agree on it."""
    bad = (~loss.detach().isfinite()).float()
    if plan.world > 1:
        dist.all_reduce(bad)
    return not bad.item()


def _between_steps(fault: _Fault, model: _Net, optimizer: torch.optim.Adam) -> None:
    """Damage what training keeps, behind its back."""
    path = fault.origin.module
    module: Any = model.get_submodule(path)
    weight = getattr(module, "weight", None)
    if fault.is_due("param", path):
        _write(_local(weight.detach()), fault.value)
    if fault.is_due("buffer", path):
        _write(module.gain, fault.value)
    if fault.is_due("exp_avg", path):
        _write(_local(optimizer.state[weight]["exp_avg"]), fault.value)
    # A setting is the same on all ranks.
    everywhere = fault.step == fault.plan.step
    for group in optimizer.param_groups:
        if fault.origin.kind == "lr_inf":
            group["lr"] = float("inf") if everywhere else 1e-3
    if fault.origin.kind == "eps_zero" and everywhere:
        for group in optimizer.param_groups:
            group["eps"] = 0.0
        # Of a weight whose gradients have been zero from the start the ratio is 0 / 0.
        state = optimizer.state[weight]
        weight.register_hook(torch.zeros_like)
        for name in ("exp_avg", "exp_avg_sq"):
            _local(state[name]).zero_()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def launch(plan_json: dict[str, Any], directory: str) -> None:
    """Carry out a plan; the run is in `directory`/run."""
    plan, place = Plan.of_json(plan_json), Path(directory)
    os.chdir(place)
    reading, writing = os.pipe()

    def body(rank: int) -> None:
        if plan.world > 1:
            store = dist.TCPStore(
                "127.0.0.1", int(os.read(reading, 5)), plan.world, is_master=False
            )
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=plan.world,
                timeout=timedelta(seconds=WAIT_SECONDS),
            )  # fmt: skip
        _train(plan, rank, place / "run")

    errors = place / "ranks.txt"
    pids = [start_rank(lambda r=rank: body(r), errors) for rank in range(plan.world)]  # type: ignore[misc]  # mypy cannot infer it
    if plan.world > 1:  # after the forks: it has a thread
        store = dist.TCPStore("127.0.0.1", 0, plan.world, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port:05}".encode() * plan.world)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if not plan.origin.then and failed:
        with contextlib.suppress(OSError):
            print(errors.read_text()[-2000:])
        raise RuntimeError(f"{len(failed)} ranks failed")
