"""Which node speaks for which ranks to the head's daemon, and how it proves who it is.

At `install()` the first rank of each node draws a secret and says its digest in the rendezvous, so
the secret itself never stands in the job's store, where every rank can read. Rank 0 writes the
digests and the ranks of each node down for the head's daemon; each node keeps its own secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from ddpprobe.rundir import paths
from ddpprobe.rundir.validate import MALFORMED

SECRET, ROSTER = "secret", "roster"  # suffixes of a daemon's files, see `RunDir.daemon_file`
MAX_BYTES = 64 << 20

logger = logging.getLogger("ddpprobe")


class Door(Protocol):
    """Who may push."""

    def admits(self, node: str, secret: str) -> bool:
        """Whether this secret proves that it is that node."""


@final
@dataclass(frozen=True, slots=True)
class Roster:
    """The other nodes of one attempt: ranks and digest of the secret, by the node's name."""

    attempt: int
    ranks: Mapping[str, frozenset[int]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def admits(self, node: str, secret: str) -> bool:
        """Whether this secret proves that it is that node."""
        known = self.digests.get(node)
        return known is not None and hmac.compare_digest(known.encode(), digest(secret).encode())

    def write(self, path: Path) -> None:
        """Write it down, for this user only."""
        nodes = {n: {"digest": d, "ranks": sorted(self.ranks[n])} for n, d in self.digests.items()}
        paths.write_json(path, {"attempt": self.attempt, "nodes": nodes})

    @classmethod
    def read(cls, path: Path) -> Roster | None:
        """Return what was written; None if nothing was. A damaged one admits nobody."""
        try:
            with path.open("rb") as file:
                value = json.loads(file.read(MAX_BYTES))
            nodes = {str(name): said for name, said in value["nodes"].items()}
            return cls(
                int(value["attempt"]),
                {name: frozenset(map(int, said["ranks"])) for name, said in nodes.items()},
                {name: str(said["digest"]) for name, said in nodes.items()},
            )
        except FileNotFoundError:
            return None
        except (OSError, *MALFORMED) as error:
            logger.error(  # noqa: TRY400  (the reason is in it)
                "ddpprobe: %s cannot be read (%s), so that no other node can push: restart the job",
                path, error,
            )  # fmt: skip
            return cls(-1)


@final
class Shared:
    """One secret of all nodes, for daemons that are started by hand: a node is who it says it is.

    Raises:
        ValueError: the secret is empty.
    """

    def __init__(self, token: str) -> None:
        if not token:
            msg = "the gather needs a token: an empty one would let anybody push"
            raise ValueError(msg)
        self._token = token.encode()

    def admits(self, node: str, secret: str) -> bool:
        """Whether this is the secret, and a name is given."""
        return bool(node) and hmac.compare_digest(self._token, secret.encode())


def new_secret() -> str:
    """Return a secret that nobody can guess."""
    return os.urandom(32).hex()


def digest(secret: str) -> str:
    """Return what may be known of a secret by everybody: it is drawn, so it cannot be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()


def keep_secret(path: Path, secret: str) -> None:
    """Put this node's secret where only this user's daemon can read it."""
    paths.make_inner(path.parent)
    paths.write_json(path, {"secret": secret})


def secret_at(path: Path) -> str:
    """Return the secret that is kept there, "" without one."""
    try:
        return str(json.loads(path.read_bytes())["secret"])
    except (OSError, *MALFORMED):
        return ""
