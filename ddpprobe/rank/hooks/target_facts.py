"""What a model is trained towards, as far as its output tells: facts of a sampled step.

The targets themselves are the script's. But what the model was given lies beside what it answers,
and the gradient of an output tells towards what each sample is pulled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.step_facts import is_dense
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.sweep import is_plain
from ddpprobe.rank.torch_private import dynamo, functorch, is_functorch
from ddpprobe.records.step import COPIED, PULL, PULL_REST, PULLED_MEAN, PULLED_RMS, TARGET

TENSORS = 4  # that the root is given or returns, the first ones
PLACES, FEWEST_PLACES = 64, 16  # of a text that are looked at; that say something
SAMPLES, NUMBERS = 8, 1 << 14  # the fewest of a batch, the most elements of an output
_INTEGERS = (torch.int64, torch.int32)


def add_copied(given: Iterable[object], returned: object, rows: StepRows) -> None:
    """Add the share of places of a text at which the largest logit is that of the very token there.

    Counted are places whose next token is another one: there a model that predicts the next one
    should not answer with its input, and on padding it may. Of several inputs that may be the text
    the first counts with `FEWEST_PLACES` such places: the targets of a model that shifts them
    itself come after what it is to read, and one that is trained answers with them. Nothing where
    there is none.

    Args:
        given: the root's args and kwargs; a text is of integers, [batch, length].
        returned: what the root returned; logits are [batch, length, classes].
        rows: where the number goes, on the tensor's device.
    """
    logits = next((t for t in _first(returned) if t.dim() == 3), None)
    if logits is None or logits.shape[1] < 2 or logits.shape[2] < 2:
        return
    inputs = itertools.islice((t for one in given for _, t in leaves(one)), TENSORS)
    texts = [t for t in inputs if _is_text(t, logits)]
    if not texts:
        return
    samples, places = len(logits), logits.shape[1] - 1
    along = max(1, math.ceil(places / PLACES))
    across = max(1, math.ceil(samples * math.ceil(places / along) / PLACES))
    with torch.no_grad():
        answers = logits.detach()[::across, :-1:along].argmax(-1)
        shares = torch.stack(
            [_share(answers, t[::across, :-1:along], t[::across, 1::along]) for t in texts]
        )
        rows.add_scalar(COPIED, shares.take((shares >= 0).int().argmax()))


def _is_text(tensor: Tensor, logits: Tensor) -> bool:
    """Whether a tensor may hold the tokens of which these are the logits."""
    return (
        is_dense(tensor)
        and tensor.dtype in _INTEGERS
        and tensor.shape == logits.shape[:2]
        and tensor.device == logits.device
        and not is_functorch(tensor)
    )


def _share(answers: Tensor, here: Tensor, behind: Tensor) -> Tensor:
    """Return the share of places with another token after them that are answered with their own.

    -1: there are too few of them.
    """
    changes = here != behind
    count = changes.sum()
    share = ((answers == here) & changes).sum() / count.clamp(min=1)
    return torch.where(count >= FEWEST_PLACES, share, -1.0).double()


def trained(returned: object) -> Tensor | None:
    """Return the output whose gradient tells of the targets; None: there is none.

    That is the first tensor with a gradient to come that is no loss.
    """
    found = next((t for t in _first(returned) if t.requires_grad and t.dim()), None)
    return None if found is None or found.is_leaf else found


def with_gradient(returned: object) -> list[Tensor]:
    """Return the outputs to which a backward comes, the first ones; a loss is one of them."""
    return [t for t in _first(returned) if t.requires_grad and not t.is_leaf]


def is_pulled(output: Tensor) -> bool:
    """Whether an output has as many samples as `add_pull` needs, and few enough elements."""
    return len(output) >= SAMPLES and output.numel() <= NUMBERS


@final
class PullHook:
    """A tensor hook on an output that keeps its numbers, without its graph.

    Args:
        tell: called with an output [samples, ...], its version and its gradient.
        output: that the hook will be on.
    """

    __slots__ = ("_numbers", "_tell", "_version")

    def __init__(self, tell: Callable[[Tensor, int, Tensor], object], output: Tensor) -> None:
        self._tell, self._numbers = tell, output.detach()
        self._version = output._version  # noqa: SLF001  (public by documentation)

    @dynamo.hands_back
    def __call__(self, gradient: Tensor | None) -> None:
        """Hear of the gradient."""
        if gradient is not None:
            self._tell(self._numbers, self._version, gradient)


def add_pull(output: Tensor, gradient: Tensor, rows: StepRows) -> None:
    """Add how the gradient of an output depends on the output, in each of its columns.

    With a squared error a sample's gradient is its distance to its own target, times a number. If
    it is a straight line over the output, all samples are pulled to one and the same target. Added
    are the line's slope, the share of the gradient's variance that no line explains, where the line
    is zero, and rms and mean of the output: but for the share, means of all columns with a
    gradient.

    Args:
        output: [samples, ...].
        gradient: of its shape.
        rows: where the numbers go, on the tensor's device.
    """
    with torch.no_grad(), functorch.outside():
        x, g = (t.detach().reshape(len(t), -1).double() for t in (output, gradient))
        mean_x, mean_g, rms = x.mean(0), g.mean(0), x.square().mean(0).sqrt()
        x, g = x - mean_x, g - mean_g
        xx, gg, xg = x.square().sum(0), g.square().sum(0), (x * g).sum(0)
        active = (gg > 0) & (xx > 0)
        slope = xg / xx
        rest = 1.0 - torch.where(active, slope * xg, 0.0).sum() / gg.sum()
        each = torch.stack((slope, mean_x - mean_g / slope, rms, mean_x))
        means = torch.where(active, each, 0.0).sum(1) / active.sum()
        names = PULL, TARGET, PULLED_RMS, PULLED_MEAN, PULL_REST
        rows.add_scalars(names, torch.cat((means, rest[None])))


def _first(returned: object) -> list[Tensor]:
    found = itertools.islice((t for _, t in leaves(returned)), TENSORS)
    return [t for t in found if has_numbers(t)]


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor can be read as it lies."""
    return is_dense(tensor) and is_plain(tensor) and not tensor.is_meta
