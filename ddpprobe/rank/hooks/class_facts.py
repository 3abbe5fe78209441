"""What a cross-entropy over classes shows of its labels: facts of a sampled step.

The gradient of a row of logits is w (p - q): p its softmax, q the label, w the weight of the row in
the loss. So who sees logits and gradient knows label and weight, without having seen the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.torch_private import dynamo, functorch
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_LOOKED,
    CLASS_OF_ALL,
    CLASS_POWER,
    CLASS_RIGHT,
    CLASS_ROWS,
    CLASS_SEEN,
    CLASS_SURE,
    CLASS_WEIGHT,
    LABEL_BITS,
)

ROWS, FEWEST_ROWS = 256, 8  # that are looked at, at most; that say something
# Fewer where these have about so many elements, but so many rows at least; columns of them for the
# line, at most.
ELEMENTS, ENOUGH_ROWS, COLUMNS = 1 << 16, 16, 64
# Of the variance of a gradient, what no line over the probabilities explains; the distance of a
# label's gradient to that line, in weights. bfloat16 rounds to a hundredth of both.
LINE, NEAR = 1e-2, 0.03
SMOOTHED = 0.5  # label smoothing, at most
# Rows of one label weigh the same in a loss that weighs classes: so many rows more than labels, and
# weights that differ by so much (standard deviation of the logarithm). No row that is surer says
# it.
MORE_ROWS, ALIKE, UNSURE = 8, 0.05, 0.9
APART = math.log(1.5)  # weights of labels that are unlike each other
SURE = -1e-3  # logarithm of a probability: beyond it the gradient may be too small for its dtype


def looked_at(tensor: Tensor) -> Tensor:
    """Return a copy of rows of an output, [rows, classes]: the same for its gradient.

    A vector is rows of one number each. Classes are the last dimension, and the second of images
    [samples, classes, height, width]. The distance of the rows has no factor in common with their
    number: places of a text come in turn.
    """
    if tensor.dim() == 1:
        tensor = tensor[:, None]
    if tensor.dim() > 3:
        tensor = tensor.movedim(1, -1)
    *sizes, classes = tensor.shape
    rows = math.prod(sizes)
    step = rows // min(rows, ROWS, max(ENOUGH_ROWS, ELEMENTS // classes))
    while math.gcd(step, rows) > 1:
        step += 1
    at = torch.arange(0, min(rows, ROWS * step), step, device=tensor.device)
    index: list[Tensor] = []
    for size in reversed(sizes):
        index.insert(0, at % size)
        at = at // size
    return tensor[tuple(index)]


def classes_of(output: Tensor) -> int:
    """Return how many logits a row of an output has; 0: it has too few rows to tell.

    A vector is rows of one logit each.
    """
    classes = output.shape[1 if output.dim() > 3 else -1] if output.dim() > 1 else 1
    return classes if classes and output.numel() >= FEWEST_ROWS * classes else 0


@final
class ClassHook:
    """A tensor hook on logits that keeps a copy of the rows that are looked at, and no more.

    It hears of the first backward; another one of the same forward may be of another loss.

    Args:
        tell: called with these rows [rows, classes], their gradient, and how many rows all are.
        output: that the hook will be on.
    """

    __slots__ = ("_all", "_kept", "_tell")

    def __init__(self, tell: Callable[[Tensor, Tensor, int], object], output: Tensor) -> None:
        with torch.no_grad():
            self._kept: Tensor | None = looked_at(output.detach()).float()
        self._tell, self._all = tell, output.numel() // self._kept.shape[1]

    @dynamo.hands_back
    def __call__(self, gradient: Tensor | None) -> None:
        """Hear of the gradient."""
        kept, self._kept = self._kept, None
        if kept is not None and gradient is not None:
            self._tell(kept, gradient, self._all)


def add_classes(logits: Tensor, gradient: Tensor, rows_of_all: int, rows: StepRows) -> None:
    """Add what the gradient of logits tells of a cross-entropy; NaN where it is of another loss.

    But for the label's own, the gradients of all rows are one line over the probabilities: its
    slope is the weight of a row, and it is zero where smoothing has put the others' share. Rows
    without any gradient, of which the answer is not sure, have no label: they are ignored, as
    padding is. Where the weight is one for each label, each row has its own slope, and none is
    smoothed. Added are how many rows there are and are looked at, the weight, the share of rows
    that have a label, of those with a gradient the share whose largest logit is that of the label,
    the label if it is the same in all, of as many samples as are needed (-1: it is not), and which
    labels there are: a bit for each, modulo `LABEL_BITS`. And by which power of its share among the
    rows a label weighs (0: all weigh the same; -1: the inverse), and the share of rows without a
    gradient that are sure of their answer: with a label it may be too small, so nobody can tell.

    Args:
        logits: float32 [rows, classes], of the rows that are looked at.
        gradient: of the whole output.
        rows_of_all: how many rows the output has.
        rows: where the numbers go, on the tensor's device.
    """
    with torch.no_grad(), functorch.outside():
        g = looked_at(gradient.detach()).float()
        classes = g.shape[1]
        step = math.ceil(classes / COLUMNS)
        (own, label), (high, answer), whole = g.min(1), logits.max(1), logits.logsumexp(1)
        counts = (own < 0) | (g.amax(1) > 0)
        n = counts.sum()
        silent, sure = ~counts, high - whole >= SURE
        ignored = (silent & ~sure).sum()
        columns = torch.arange(0, classes, step, device=g.device)
        others = counts[:, None] & (columns != label[:, None])
        both = torch.stack(((logits[:, ::step] - whole[:, None]).exp(), g[:, ::step])) * others
        means = both.sum((1, 2)) / others.sum()
        dp, dg = (both - means[:, None, None]) * others
        # The gradient of a mean over many rows is small: its squares would be none in float32.
        largest = dg.abs().max()
        dg = dg / largest
        pp, gg, pg = dp.square().sum(), dg.square().sum(), (dp * dg).sum()
        weight = pg / pp * largest
        share = means[0] - means[1] / weight  # of each class but the label, by smoothing
        smoothed = share * classes
        p = (logits.gather(1, label[:, None])[:, 0] - whole).exp()
        beside = ((own / weight - p + 1 - smoothed + share).abs() * counts).max()
        fits = (
            (weight > 0)
            & (pg.square() >= (1 - LINE) * pp * gg)
            & (beside <= NEAR)
            & (smoothed.abs() <= SMOOTHED)
        )
        first = label.take(counts.float().argmax())
        # The places of one sample may well have one label.
        enough = n >= (FEWEST_ROWS if len(gradient) >= FEWEST_ROWS else math.inf)
        alike = ((label == first) | ~counts).all() & enough
        right = ((answer == label) & counts).sum()
        bits = torch.arange(LABEL_BITS, dtype=torch.float64, device=g.device)
        is_of = label[:, None] % LABEL_BITS == bits
        there = (is_of & counts[:, None]).any(0)
        seen = (there * 2.0**bits).sum()
        if lanes.is_near(g.device) and bool(fits):  # elsewhere nobody waits for that
            by_label, power = weight, torch.zeros(())
        else:
            says = counts & (p < UNSURE)
            by_label, power = _by_label(-own / (1 - p), both, others, is_of, counts, says)
        weight, power = torch.where(fits, weight, by_label), torch.where(fits, 0.0, power)
        facts = weight, n / (n + ignored), right / n, torch.where(alike, first, -1), seen
        known = fits | (by_label > 0)
        told = torch.where(known, torch.stack([one.double() for one in facts]), math.nan)
        names = CLASS_WEIGHT, CLASS_LABELLED, CLASS_RIGHT, CLASS_OF_ALL, CLASS_SEEN
        rows.add_scalars(names, told)
        rows.add_scalar(CLASS_POWER, power.double())
        rows.add_scalar(CLASS_SURE, (silent & sure).sum() / len(g))
        rows.add_scalar(CLASS_ROWS, rows_of_all)
        rows.add_scalar(CLASS_LOOKED, len(g))


def _by_label(
    weights: Tensor, both: Tensor, others: Tensor, is_of: Tensor, labelled: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weight of a row, mean of all, and by which power of its share a label weighs.

    Both are NaN unless rows of one label weigh the same.

    Args:
        weights: what each row would weigh, by the gradient of its label [rows].
        both: probabilities and gradients [2, rows, columns]; those of labels are zero.
        others: which columns are not the row's label [rows, columns].
        is_of: which rows have a label, modulo `LABEL_BITS` [rows, labels].
        labelled: which rows have one [rows].
        counts: which of these say what they weigh [rows].
    """
    some = others & counts[:, None]
    beside = (both[1] / weights[:, None] - both[0]).where(some, 0.0)
    each = beside.square().sum() <= LINE * both[0].where(some, 0.0).square().sum()
    each &= (beside.abs().max() <= NEAR) & (some.sum() > counts.sum())  # of two, one is no proof
    logs = weights.log().where(counts, 0.0)
    of = (is_of & counts[:, None]).double()
    rows = of.sum(0)
    means = logs.double() @ of / rows.clamp(min=1)
    more = rows.sum() - (rows > 0).sum()
    within = ((logs.double() - of @ means).where(counts, 0.0)).square().sum() / more
    fits = each & (more >= MORE_ROWS) & (within <= ALIKE**2)
    many = rows > 1
    dx, dy = (
        (one - (one * many).sum() / many.sum()).where(many, 0.0)
        for one in ((is_of & labelled[:, None]).sum(0).clamp(min=1).double().log(), means)
    )
    apart = dy.max() - dy.min() >= APART
    power = torch.where(apart, (dx * dy).sum() / dx.square().sum(), 0.0)
    mean = logs.double().exp().where(counts, 0.0).sum() / counts.sum()
    return torch.where(fits, mean, math.nan), torch.where(fits, power, math.nan)
