"""What batch norms in training mode normalize by, and what their running statistics keep."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.step import NORM_MOMENTUM, NORM_VALUES

# Those that normalize by the values of one rank, and all.
_ALONE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ALL = (*_ALONE, nn.SyncBatchNorm)


class NormFacts:
    """Follows the batch norms that are called in a step."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget those of the step before."""
        self._fewest = math.inf  # values by which one normalizes a channel
        self._momentum = -math.inf  # the largest of those that have running statistics

    def take(self, module: nn.Module, output: object) -> None:
        """Look at a module that was called."""
        if not isinstance(module, _ALL) or not module.training or not isinstance(output, Tensor):
            return
        if isinstance(module, _ALONE):
            self._fewest = min(self._fewest, output.numel() / max(module.num_features, 1))
        # Without a momentum the statistics are the mean of all batches; a tensor is not waited for.
        if module.track_running_stats and isinstance(module.momentum, int | float):
            self._momentum = max(self._momentum, module.momentum)

    def tell(self, rows: StepRows) -> None:
        """Add what is known of them now."""
        for name, number in ((NORM_VALUES, self._fewest), (NORM_MOMENTUM, self._momentum)):
            if math.isfinite(number):
                rows.add_scalar(name, number)
