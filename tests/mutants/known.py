"""The survivors that somebody has looked at, from `survivors.toml`, and what a run says of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.tool import UNTESTED, Mutant

FILE = Path(__file__).parent / "survivors.toml"


@dataclass(frozen=True)
class Known:
    """One survivor, or (without `was` and `now`) a function that the room's tests do not run.

    Attributes:
        where: module and function.
        was, now: the lines of the change.
        why: the reason why no test notices.
        equivalent: no test can: the program does the same.
    """

    where: str
    why: str
    was: str = ""
    now: str = ""
    equivalent: bool = False

    def covers(self, mutant: Mutant) -> bool:
        """Whether this is that mutant."""
        if self.where != mutant.where:
            return False
        if not self.was and not self.now:
            return mutant.status == UNTESTED
        return (self.was, self.now) == (mutant.was, mutant.now)


@dataclass(frozen=True)
class Verdict:
    """A room's result: how many mutants were tried and killed, and who survived.

    Attributes:
        tried: all that have a result.
        new: survivors that nobody has looked at.
        listed: those that are listed, and are no equivalents.
        equivalents: those that no test can notice.
    """

    tried: int
    new: tuple[Mutant, ...]
    listed: tuple[Mutant, ...]
    equivalents: tuple[Mutant, ...]

    @property
    def killed(self) -> int:
        """Mutants that a test noticed."""
        return self.tried - len(self.new) - len(self.listed) - len(self.equivalents)

    @property
    def rate(self) -> float:
        """The share killed of those that can be; nothing is shown where nothing was tried."""
        those = self.tried - len(self.equivalents)
        return self.killed / those if those else float(self.tried > 0)


def load(file: Path = FILE) -> list[Known]:
    """Read the list.

    Raises:
        ValueError: an entry lacks a reason, or a word in it is unknown.
    """
    found = []
    for entry in tomllib.loads(file.read_text()).get("survivor", []):
        unknown = set(entry) - {"where", "was", "now", "why", "equivalent"}
        if unknown or not entry.get("where") or not entry.get("why"):
            raise ValueError(
                f"{file.name}: an entry has `where` and `why`, and may have `was`, `now` and "
                f"`equivalent`; this one is {entry}"
            )
        found.append(Known(**entry))
    return found


def judge(tried: int, survivors: Iterable[Mutant], known: Iterable[Known]) -> Verdict:
    """Sort the survivors of a room."""
    table, new = list(known), list[Mutant]()
    listed, equivalents = list[Mutant](), list[Mutant]()
    for mutant in survivors:
        entry = next((k for k in table if k.covers(mutant)), None)
        if entry is None:
            new.append(mutant)
        else:
            (equivalents if entry.equivalent else listed).append(mutant)
    return Verdict(tried, tuple(new), tuple(listed), tuple(equivalents))
