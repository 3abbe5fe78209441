"""Whether an activation lies between what a model returns and a loss that has one of its own.

`cross_entropy` computes a softmax itself, and `binary_cross_entropy_with_logits` a sigmoid. If the
outputs went through an activation before, nothing fails, and little is learned: but the gradient of
the outputs has a form then that no other loss gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpprobe.rank.hooks.class_facts import looked_at
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.torch_private import functorch
from ddpprobe.records.step import EXTRA_ACTIVATION, EXTRA_ACTIVATIONS

LOOKS = 128  # the first ones: a loss is what it is from the first step on
# Of the rows that are looked at, as many as have so many numbers; and classes, at most. A look is
# some hundred operations, and few rows show a form as well as many.
NUMBERS, CLASSES = 1 << 13, 1 << 10
# Shares of a gradient's square that a form leaves unexplained. The right one leaves 1e-14 in
# float32 and 1e-5 in bfloat16. Near their start logits are almost equal, and so are all losses: the
# loss without an activation must leave a hundred times more, and more than rounding may.
FITS, TIMES, LEAST = 1e-3, 100.0, 1e-8
# By pair what is left unexplained after its activation, and by its rival.
Found = dict[tuple[str, str], tuple[Tensor, Tensor]]
_TINY = 1e-6  # derivatives below it cannot be divided by


def add_extra_activation(outputs: Tensor, gradient: Tensor, rows: StepRows) -> None:
    """Add the place in `EXTRA_ACTIVATIONS`, from 1 on, of the pair that the gradient shows.

    0: it shows none; NaN: it would be the same without an activation, or nearly.

    Args:
        outputs: float32 [rows, classes], of what the model returned: the rows that are looked at.
        gradient: of the whole output.
        rows: where the number goes, on the tensor's device.
    """
    classes = outputs.shape[1]
    if classes > CLASSES:
        return
    with torch.no_grad(), functorch.outside():
        g = looked_at(gradient.detach()).float()
        some = NUMBERS // classes
        outputs, g = outputs[:some], g[:some]
        g = g / g.abs().max()  # so that the squares of small ones are not zero
        s, cut = outputs.sigmoid(), _is_cut(outputs, g)
        found = _of_numbers(outputs, g, s, cut)
        if classes > 1:
            found |= _of_classes(outputs, g, s, cut)
        fits = {pair: rest <= FITS for pair, (rest, _) in found.items()}
        # Where all are pulled one way and lie close together, any smooth loss has the slope of a
        # form somewhere.
        known = (g < 0).any() & (g > 0).any()
        places = [
            torch.where(fits[pair] & known & _is_apart(*found[pair]), place, 0)
            for place, pair in enumerate(EXTRA_ACTIVATIONS, 1)
            if pair in found
        ]
        place = torch.stack(places).amax()
        undecided = torch.where(torch.stack([*fits.values()]).any(), torch.nan, 0.0)
        rows.add_scalar(EXTRA_ACTIVATION, torch.where(place > 0, place, undecided).double())


def _is_apart(rest: Tensor, rival: Tensor) -> Tensor:
    return (rival >= TIMES * rest) & (rival >= LEAST)


def _of_numbers(outputs: Tensor, g: Tensor, s: Tensor, cut: Tensor) -> Found:
    """Return what a binary cross-entropy leaves unexplained after an activation, and without one.

    Labels are 0 and 1, whose weights differ where a loss has a `pos_weight`. `s`: sigmoid of the
    outputs; `cut`: as of `_is_cut`.
    """
    y = (g < 0).float()  # these are to be larger
    seen = g != 0
    plain = _rest_by_label(g, (s - y) * seen, y)
    relu = (outputs > 0) * (outputs.relu().sigmoid() - y)
    # In the model: the outputs are probabilities, and right would be the binary cross-entropy of
    # these.
    inside = ((outputs >= 0) & (outputs <= 1)).all()
    of_probabilities = (outputs - y) / (outputs * (1 - outputs)).clamp(min=_TINY)
    return {
        ("sigmoid", "binary"): (_rest(g, s * (1 - s) * (s.sigmoid() - y) * seen), plain),
        ("ReLU", "binary"): (_rest(g, relu * seen), cut),
        ("sigmoid inside", "binary"): (
            torch.where(inside, _rest(g, (s - y) * seen), 1.0),
            _rest_by_label(g, of_probabilities * seen, y),
        ),
    }


def _of_classes(outputs: Tensor, g: Tensor, s: Tensor, cut: Tensor) -> Found:
    """Return the same of a cross-entropy over classes.

    The gradient of a row of logits is softmax less label, times a weight; an activation multiplies
    it by its derivative. Divided by that, its least number is that of the label.
    """
    seen = g != 0  # others are ignored, or too sure for their dtype
    p, label = outputs.softmax(1), _label(g)
    plain = _rest(g, (p - label) * seen)
    of_p = p.softmax(1) - _label(g / p.clamp(min=_TINY))
    of_p = p * (of_p - (p * of_p).sum(1, keepdim=True))
    slope = s * (1 - s)
    of_s = slope * (s.softmax(1) - _label(g / slope.clamp(min=_TINY)))
    of_relu = (outputs > 0) * (outputs.relu().softmax(1) - label)
    return {
        ("softmax", "classes"): (_rest(g, of_p * seen), plain),
        ("sigmoid", "classes"): (_rest(g, of_s * seen), plain),
        ("ReLU", "classes"): (_rest(g, of_relu * seen), cut),
    }


def _is_cut(outputs: Tensor, g: Tensor) -> Tensor:
    """Return 1 if outputs that are not positive have no gradient, each of them, otherwise 0.

    After a ReLU the form differs from that without in nothing else.
    """
    cut = outputs <= 0
    return (cut.any() & (~cut | (g == 0)).all()).float()


def _label(g: Tensor) -> Tensor:
    """Return one-hot rows of the least numbers, zeros where none of a row is negative."""
    least, label = g.min(1)
    is_of = label[:, None] == torch.arange(g.shape[1], device=g.device)
    return is_of.float() * (least < 0)[:, None]


def _rest(g: Tensor, form: Tensor) -> Tensor:
    """Return the share of a gradient's square that is not the form times a positive weight."""
    weight = (g * form).sum() / form.square().sum()
    rest = (g - weight * form).square().sum() / g.square().sum()
    return torch.where(weight > 0, rest, 1.0)


def _rest_by_label(g: Tensor, form: Tensor, y: Tensor) -> Tensor:
    """Return that share where numbers with one label have one weight, and the others another."""
    rests = [
        _rest(g * of, form * of).nan_to_num() * (g * of).square().sum()  # NaN: none has that label
        for of in (y, 1 - y)
    ]
    return (rests[0] + rests[1]) / g.square().sum()
