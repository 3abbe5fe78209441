"""What ranks run on: libraries, the script's own files, devices; in which of it they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ddpprobe.records.rank_names import ranks_text

# Scalar of the first sampled step of a rank, for each of what ranks differ in: 0 where it has what
# most ranks have, 1, 2, ... where it has another.
SCALAR = "environment@"
CODE, GPU = "code/", "gpu"  # of names: of a file of the script's, by its path; of the device
NOTHING = "-"  # stands for what is not set


class Unlike(NamedTuple):
    """What ranks differ in, and the ranks that have each value, those of most ranks first."""

    name: str
    ranks: dict[str, list[int]]

    def __str__(self) -> str:
        """Return the values, and the ranks that have them, on one line."""
        has = (f"{value} on {ranks_text(ranks)}" for value, ranks in self.ranks.items())
        return f"{self.name}: {', '.join(has)}"


def of_metas(
    metas: Iterable[Mapping[str, Any]],
) -> tuple[dict[int, dict[str, str]], list[Unlike]]:
    """Return what the ranks that told it run on, by rank, and in what ranks differ.

    Args:
        metas: what each rank wrote of itself; what is no environment in it is left out.
    """
    environments, like = {}, {}
    for meta in metas:
        rank, told = meta.get("rank"), meta.get("environment")
        if isinstance(rank, int) and isinstance(told, dict) and told:
            environments[rank] = {k: v for k, v in told.items() if isinstance(v, str)}
        if isinstance(rank, int) and isinstance(of := meta.get("environment_of"), int):
            like[rank] = of
    return environments, differences(environments, like)


def differences(
    environments: Mapping[int, Mapping[str, str]], like: Mapping[int, int]
) -> list[Unlike]:
    """Return what differs, by name; what one has and another has not is no difference.

    A rank that logs has loaded a library that the others have not.

    Args:
        environments: of the ranks that told theirs: name -> value.
        like: rank -> the rank that told the same as it has.
    """
    found = []
    for name in sorted({name for environment in environments.values() for name in environment}):
        ranks: dict[str, list[int]] = {}
        for rank, told in sorted(like.items()):
            if (value := environments.get(told, {}).get(name)) is not None:
                ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            by_many = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
            found.append(Unlike(name, dict(by_many)))
    return found
