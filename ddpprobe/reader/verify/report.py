"""What `verify` has looked at, and what it has found."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpprobe.store.manifest import Lost

MOST_DAMAGE = 10_000  # places listed


@dataclass
class VerifyReport:
    """What was looked at, and what was found.

    Attributes:
        damage: what is lost or altered.
        notes: what a user may wonder about, but is as it should be.
        files, frames: number of files of the store and of journal frames that were checked.
    """

    damage: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    frames: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage

    def add(self, lost: Lost) -> None:
        """List damage, each place once."""
        if len(self.damage) < MOST_DAMAGE and lost not in self.damage:
            self.damage.append(lost)
