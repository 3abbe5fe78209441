"""What a collection has found and done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Collected:
    """What came into the directory, and what did not.

    Attributes:
        advance: told 1 for each file or captured tensor that was looked at.
        files, bytes: that were written.
        damage: what no directory holds intact, one text each: it is missing in the result.
        mended: what is damaged in one directory, and was taken from another.
        ranks: of the last attempt, that the result holds; `world_size` is how many there are.
        unsealed: nodes with records in journals that no daemon has put into the store.
    """

    advance: Callable[[int], None] = lambda _: None
    files: int = 0
    bytes: int = 0
    damage: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    unsealed: list[str] = field(default_factory=list)

    def wrote(self, size: int) -> None:
        """Count a file."""
        self.files += 1
        self.bytes += size

    def say(self, problems: list[str], *, found: bool) -> None:
        """List what is wrong in the sources, each thing once.

        Args:
            problems: a text each.
            found: whether another source has it intact.
        """
        known = self.mended if found else self.damage
        known += [text for text in dict.fromkeys(problems) if text not in known]
