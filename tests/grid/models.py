"""Small models, one per thing that breaks hooks, and the data they are trained on.

Each has `blocks` (what is wrapped, compiled and checkpointed one by one) and one `Spot`, where a
NaN can be born without any hook: `spot` is its path, `before_spot` that of the module whose output
it takes. The odd width makes shards uneven; RowwiseParallel wants the hidden one divisible.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, WORDS = 7, 12, 11


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, add: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x + add

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None, None


class Spot(nn.Module):
    """Returns its input; `add` or `factor` set to NaN spoils its output, or its input's gradient.

    They are plain attributes: buffers would be broadcast by DDP and moved by FSDP. `by_hook` does
    it without an autograd function of our own: after a stranger's function nobody can tell how a
    tensor lies over a tensor-parallel group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_hook = False
        self.add, self.factor = torch.tensor(0.0), torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        add, factor = self.add.to(x.dtype), self.factor.to(x.dtype)
        if not self.by_hook:
            return _Spoil.apply(x, add, factor)
        passed = x * 1
        if passed.requires_grad:
            passed.register_hook(lambda gradient: gradient * factor)
        return passed + add


class Base(nn.Module):
    """Runs its blocks, checkpointed or not."""

    spot, before_spot = "blocks.1.spot", "blocks.1.down"
    remat: str | None = None  # "checkpoint" or "reentrant"
    branch = 0

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.remat is None or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.remat == "reentrant")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.ReLU(True)
        self.down, self.spot = nn.Linear(HIDDEN, WIDTH), Spot()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.spot(self.down(self.act(self.up(self.norm(x)))))


class Mlp(Base):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        # A pipeline stage has only some of these.
        if self.stem is not None:
            x = self.stem(x)
        for block in self.blocks:
            if block is not None:
                x = self.run(block, x)
        return x if self.head is None else self.head(x)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class Shared(Base):
    """One block called three times (ALBERT)."""

    spot, before_spot = "blocks.0.spot", "blocks.0.down"

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.run(self.blocks[0], x)
        return self.head(x)


class Branches(Base):
    """Of two blocks one runs: another one on the next rank."""

    spot, before_spot = "blocks.2.spot", "blocks.2.down"

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.blocks[self.branch], self.stem(x))
        return self.head(self.run(self.blocks[2], x))


class Moe(nn.Module):
    """Three experts; the router sends no token to the last, and often few to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            self.router.bias[2] = -100.0
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.spot = Spot()

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = gates.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == index)
            out = out.index_add(0, mine, (expert(x[mine]) * gates[mine, index, None]).to(x.dtype))
        return self.spot(out)


class MoeModel(Mlp):
    before_spot = ("blocks.1.experts.1", "blocks.1.experts.0")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Moe() for _ in range(2))


@dataclass
class Output(OrderedDict):
    """Like a Hugging Face ModelOutput: a dataclass and a mapping of what is not None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    cache: object = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: Output(**dict(zip(keys, values, strict=True))),
    serialized_type_name="tests.grid.models.Output",
)


class Hf(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Output:
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(self.run(block, states[-1]))
        logits = self.head(states[-1])
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), x.flatten(), reduction="sum")
            * 0.1
        )
        return Output(loss=loss, logits=logits, hidden_states=tuple(states))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Sparse(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    forward = Tied.forward


class Attention(Base):
    spot, before_spot = "between", "blocks.1.norm2"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between = nn.Embedding(WORDS, 8), Spot()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 10, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.between(x))


class Residual(nn.Module):
    """As in torchvision: one in-place ReLU used twice, and the identity added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.conv2, self.bn2 = nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.relu, self.spot = nn.ReLU(inplace=True), Spot()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.spot(self.bn2(self.conv2(out)))
        out += x
        return self.relu(out)


class Resnet(Base):
    before_spot = "blocks.1.bn2"

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean((2, 3)))


MODELS = {
    "mlp": Mlp, "resnet": Resnet, "hf": Hf, "shared": Shared, "tied": Tied, "frozen": Frozen,
    "branches": Branches, "moe": MoeModel, "attention": Attention, "sparse": Sparse, "empty": Mlp,
}  # fmt: skip
_WORDS = ("hf", "tied", "attention", "sparse")


def build(name: str, *, inplace: bool = True) -> Base:
    """The model in its first state, the same in every process."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = inplace
    return model


def batch(name: str, step: int, micro: int, rank: int, *, even: bool = False) -> Tensor:
    """What data-parallel rank `rank` sees; the ranks' batches differ in size unless `even`."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank + 1)
    size = 4 if even else 3 + rank % 2
    if name == "empty" and rank == 0 and micro == 0 and step < 3:
        size = 0
    if name in _WORDS:
        return torch.randint(0, WORDS, (size, 4), generator=generator)
    shape = (size, 2, 6, 6) if name == "resnet" else (size, 5)
    return torch.randn(shape, generator=generator)


def loss_of(output: object) -> Tensor:
    """A sum, not a mean: of no element it is 0."""
    if isinstance(output, Output):
        return output.loss
    return output.float().square().sum() * 0.05
