"""Set F: the other ten of the twenty; see `set_e`."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class U71(Fault):
    # pytorch issue 5059, CenterNet issue 233: NumPy's state is the same in each worker, each epoch.
    # Seen: the loss of the last 20 steps 0.42 and 0.38 (1.20 and 1.22), held out 2.25 and 2.48
    # (1.20 and 1.18).
    says = "random crops begin at the same seed in each epoch: always the same texts"
    net, world, from_the_start = "gpt", 2, True
    expected = Expected(("stuck_data", "same_data"), 50)

    def prepare(self) -> None:
        self.length = self.draw.randint(4, 8)  # of an epoch, in batches

    def batch(self) -> Batch:
        if self.step % self.length == 0:
            self.data.own.manual_seed(self.epoch_seed())
        return super().batch()

    def epoch_seed(self) -> int:
        """Return what an epoch's crops are drawn by; it should be another one for each epoch."""
        return self.data_seed()


class U72(Fault):
    # VMT issue 1, GaNDLF pull request 870: images and labels are shuffled, each for itself.
    # Seen: the loss 6.0 and 8.5 at once (0.00), of the last 20 steps 1.10 at both seeds (0.00).
    says = "the images of a batch are shuffled, and its labels are not"
    net, world, expected = "cnn", 2, Expected((*LOUD, "cross_entropy"), 20)

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x[self.draw.sample(range(len(x)), len(x))], y) if self.lasts else (x, y)


class U73(Fault):
    # mistral issue 115, ml-engineering issue 32: batches of garbage, and spikes of the loss.
    # Seen: the loss 3.97 and 4.04 at once (1.28 and 1.15), of the last 20 steps 1.31 and 1.28
    # (1.22 and 1.21).
    says = "a piece of the corpus is garbage: for some steps all characters are drawn at random"
    net, world, expected = "gpt", 2, Expected(LOUD, 10)

    def prepare(self) -> None:
        self.garbage = torch.Generator().manual_seed(self.data_seed())

    def batch(self) -> Batch:
        x, y = super().batch()
        if not self.start <= self.step < self.start + 20 * self.strength:
            return x, y
        size = (len(x), x.shape[1] + 1)
        whole = torch.randint(0, nets.VOCABULARY, size, generator=self.garbage)
        return whole[:, :-1], whole[:, 1:]


class U74(Fault):
    # pytorch-forecasting issue 2293: the order of a set of names is another one in each process.
    # Seen: the loss of the last 20 steps 1.12 and 1.14 on that rank, 0.43 and 0.44 on the others
    # (0.00 on all), held out 0.41 and 0.42 (0.00).
    says = "one rank numbers the classes in another order"
    net, world, from_the_start = "cnn", 3, True
    expected = Expected(("rank_outlier", "cross_entropy"), 50, rank=True)

    def prepare(self) -> None:
        self.order = torch.tensor(self.draw.choice(((1, 2, 0), (2, 0, 1), (1, 0, 2), (2, 1, 0))))

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x, self.order[y]) if self.mine else (x, y)


class U75(Fault):
    # NeMo Automodel issue 3796, OLMo-core pull request 657: the mean over no labels.
    # Seen: NaN on all ranks from the next step on, weights too (0.75 and 0.74).
    says = "a batch of one rank has prompts only: there is nothing to learn from, and 0 / 0"
    net, world, expected = "gpt", 3, Expected(("nonfinite",), 1, rank=True)

    def batch(self) -> Batch:
        x, y = super().batch()
        prompts = torch.randint(4, 20, (len(x), 1), generator=self.data.own)
        if self.due and self.mine:
            prompts[:] = x.shape[1]
        return x, y.masked_fill(torch.arange(x.shape[1]) < prompts, -100)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        counts = y != -100
        likely = self.wrapped(x).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        return -(likely * counts).sum() / counts.sum()


class _Listed(nets.Gpt):
    """The `Gpt`, whose blocks are kept in a list of Python: nobody knows of them."""

    def __init__(self) -> None:
        super().__init__()
        blocks = list(self.blocks)
        del self.blocks
        self.blocks = blocks


class U79(Fault):
    # pytorch issues 59925 and 38639: modules in a list are no modules of the model.
    # Seen: the loss of the last 20 steps 2.77 at both seeds (1.22 and 1.21): that of a guess.
    says = "the blocks are in a list, not in a ModuleList: they are never trained"
    net, world, from_the_start = "gpt", 2, True
    expected = Expected(("coverage", "never_updated", "frozen_param", "grad_dropped"), 50)

    def make_model(self) -> nn.Module:
        return _Listed()


class U81(Fault):
    # Lightning issue 5455, lightly-train pull request 301: a resume without the scheduler's state.
    # Seen: the loss of the last 20 steps 1.03 and 0.63 (0.56 and 0.49), held out 0.99 and 0.54
    # (0.55 and 0.43).
    says = "a resume begins the schedule anew: the rate is what it was before it fell to a tenth"
    net, world, expected = "cnn", 2, Expected(LOUD, 30)

    def batch(self) -> Batch:
        return self.data.images(noise=4.0)

    def before_step(self) -> None:
        place = self.step - self.start if self.lasts else self.step
        peak = 0.045 * self.strength**0.5
        for group in self.optimizer.param_groups:
            group["lr"] = peak if place < 100 else peak / 10


class _Tied(nets.Gpt):
    """The `Gpt`, whose head has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class U83(Fault):
    # pytorch issue 3121, transformers pull request 26441, RetNet issue 31.
    # Seen: the mean loss of steps 0 to 5 17.3 and 17.7 (2.8, with a deviation of 0.02), of the
    # last 20 1.92 and 2.36 (1.20 and 1.17).
    says = "the head has the weights of the embedding, which begins as torch has it: far too large"
    net, world, from_the_start = "gpt", 2, True
    expected = Expected(("init_scale", "attn_logit", "output_jump", *LOUD), 50, module=True)
    modules = ("embed|head|place",)

    def make_model(self) -> nn.Module:
        return _Tied()


class U86(Fault):
    # tensorflow issue 40042, DeepSpeed issue 1617, Megatron-LM pull request 4662.
    # Seen: a step takes 72 and 90 ms in the end (21 and 30, on a machine with other work); the
    # weights are the same.
    says = "one rank gets hot: within 20 steps all that it computes takes longer"
    net, world = "gpt", 3
    expected = Expected(("straggler",), 50, rank=True)

    def prepare(self) -> None:
        for module in (self.model.embed, *self.model.blocks, self.model.norm, self.model.head):
            module.register_forward_hook(self._wait)

    def _wait(self, _: nn.Module, __: object, out: Tensor) -> None:
        if self.lasts and self.mine:
            heat = min(1.0, (self.step - self.start + 1) / 20)
            time.sleep(0.003 * self.strength * heat)
            out.register_hook(lambda _: time.sleep(0.006 * self.strength * heat))


class U90(Fault):
    # fairscale issue 423, Lightning-GPT pull request 17: what FSDP puts in the model is not in it.
    # Seen: the loss of the last 20 steps 2.93 and 2.94 (1.22 and 1.21): nothing is learned.
    says = "the optimizer is made before FSDP2 shards the model: it steps weights that nobody has"
    net, world, wrap, from_the_start = "gpt", 2, "fsdp2", True
    expected = Expected(
        ("never_updated", "frozen_param", "coverage", "update_ratio", "grad_spike",
         "level_shift"), 50,
    )  # fmt: skip

    def prepare(self) -> None:
        self.made_too_early = super().make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.made_too_early


SET_F: dict[str, type[Fault]] = {
    one.__name__: one for one in (U71, U72, U73, U74, U75, U79, U81, U83, U86, U90)
}
