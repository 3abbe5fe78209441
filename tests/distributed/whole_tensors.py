"""One captured step under a wrapper, of a model whose numbers are exact in float32.

All values are small whole numbers, so sums do not depend on their order, and what the ranks hold
must be the unsharded model's tensors bit for bit. `train` runs on the ranks, after the cases of
`wrappers_job`; `differences` reads what they left.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpprobe
from ddpprobe.testing import state_hash
from tests.distributed import wrappers_job
from tests.distributed.wrappers_job import batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.down(self.act(self.up(x))) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 5)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, scale=2.0)
        return self.head(h) + 0 * self.drop(self.head.bias)


def build() -> Net:
    model, g = Net(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=g).clamp(-1, 1))
    return model


def replicas(case: str, world: int) -> int:
    """How many data-parallel ranks a case has."""
    return {"tp": 1, "fsdp2-tp": 2}.get(case, world)


def train(case: str, out: Path | None) -> str:
    """Two steps, the first of them captured; returns the hash of all training state."""
    torch.manual_seed(dist.get_rank())
    model = build()
    wrapped, group, _ = wrappers_job.CASES[case](model)
    probe = None
    if out is not None:
        chosen = ("", "embed", "blocks*", "head")
        probe = ddpprobe.install(wrapped, run_dir=out, every=2, daemon="none", capture=chosen)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.5)
    counts = set()
    for _ in range(2):
        y = wrapped(batch(0, group))
        (y.sum() * replicas(case, dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()
        inner = [m for m in model.modules() if m is not model]
        counts.add(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in inner))
    if probe is not None:
        assert len(counts) == 1, counts  # nothing of ours stays on a module
        probe.close()
    return state_hash(wrapped, optimizer)


def reference(groups: int) -> dict[str, torch.Tensor]:
    """Every tensor of one process with the unwrapped model, by the name of its site."""
    model, found = build(), {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            found[f"{name}:input[0]"] = args[0].detach().clone()
            found[f"{name}:output"] = output.detach().clone()
            output.register_hook(lambda g: found.__setitem__(f"{name}:grad_output", g * groups))

        return hook

    for name, module in model.named_modules():
        if name != "drop":
            module.register_forward_hook(keep(name))
    model(torch.cat([batch(0, group) for group in range(groups)])).sum().backward()
    for name, parameter in model.named_parameters():
        found[f"{name}:param"] = parameter.detach()
        found[f"{name}:grad"] = parameter.grad
    return found


def differences(out: Path, world: int) -> list[str]:
    """Return a line per tensor of a case that is not the unsharded model's, bit for bit."""
    wrong = []
    for case in CASES[world]:
        run = ddpprobe.open(out / case)
        (captured,) = run.captures()
        want = reference(replicas(case, world))
        mine = {site for site in captured.sites if not site.endswith((":buffer", "]:rng", "[cpu]"))}
        wrong += [f"{case}: {site} on one side only" for site in mine ^ want.keys()]
        for site in sorted(mine & want.keys()):
            whole = np.asarray(run.tensor(site, 0)[...])
            if not np.array_equal(whole, want[site].numpy()):
                wrong.append(f"{case}: {site} differs")
        if captured.ranks != tuple(range(world)) or not captured.complete:
            wrong.append(f"{case}: {captured}")
    return wrong


# Of each world size; that of three has uneven shards. Tensor parallelism is not exact there: torch
# gives a third of a bias to each rank.
CASES = {
    3: ("fsdp1", "fsdp2"),
    4: ("ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2-tp"),
}
