"""What `probe.note` was told: checked, and remembered for a run that begins only later."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import final

logger = logging.getLogger("ddpprobe")


@final
class Notes:
    """What the script says of its training.

    Attributes:
        config: hyper-parameters so far, by name.
    """

    def __init__(self) -> None:
        self.config: dict[str, object] = {}
        self._warned = False

    def take(self, what: object, config: object) -> tuple[str, dict[str, object]] | None:
        """Return what is to be written down, as texts and a mapping; None: nothing was said.

        What is no mapping is told once and left out: training goes on, whatever a script notes.
        """
        kept: dict[str, object] = {}
        if isinstance(config, Mapping):
            kept = dict(config)
        elif config is not None and not self._warned:
            self._warned = True
            logger.warning(
                "ddpprobe: what probe.note() was given as config is not kept: it must be a mapping "
                "of names to values, such as config=vars(args), and it is a %s",
                type(config).__name__,
            )
        self.config |= kept
        said = "" if what is None else str(what)
        return (said, kept) if said or kept else None
