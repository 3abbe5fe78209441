"""Carrying one group of the store to another place: from a disk to a bucket, or back.

Over there the same holds at every instant as here: files that are new; the manifest; what replaces
a file; metadata last. The manifest over there is made anew each time, in two lines, what the group
was and what it becomes: between two visits the writer may have made any number of commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ddpprobe.errors import StoreDamaged
from ddpprobe.store.commit import metadata_last
from ddpprobe.store.manifest import GROUP_JSON, Manifest, State, Version, in_two_lines


class Moved(Exception):
    """What was to be carried is not that any more: its writer went on. Look again."""


class Target(Protocol):
    """Where a group is carried to."""

    def read_manifest(self, name: str) -> bytes | None:
        """Return the manifest that is there."""

    def write_manifest(self, name: str, data: bytes) -> None:
        """Replace it, all at once."""

    def version(self, group: str, key: str) -> Version | None:
        """Return what a file there is; None if there is none."""

    def copy(self, group: str, files: Sequence[tuple[str, Version]]) -> None:
        """Bring files there, each all at once. Raises Moved if one is not of its version."""

    def delete(self, group: str, keys: Sequence[str]) -> None:
        """Take files away; some may be gone already."""


def carry(target: Target, name: str, group: str, after: State, before: State | None = None) -> None:
    """Make a group over there what `after` says.

    Args:
        target: the other place.
        name: of the manifest, without `.log`.
        group: path of the group in the hierarchy.
        after: what is to be there.
        before: what is there, where that is known.

    Raises:
        Moved: its writer went on meanwhile.
        StoreDamaged: the manifest over there is damaged.
    """
    if before is None:
        before = state_there(target, name, group)
    changed = {k: v for k, v in after.files.items() if before.files.get(k) != v}
    gone = sorted(before.files.keys() - after.files.keys())
    if not changed and not gone and _progress(before) == _progress(after):
        return
    new = [k for k in changed if k not in before.files and not k.endswith(GROUP_JSON)]
    target.copy(group, [(k, changed[k]) for k in sorted(new)])
    target.write_manifest(name, in_two_lines(before, after))
    rest = sorted(changed.keys() - set(new), key=metadata_last)
    last = [k for k in rest if k == GROUP_JSON]
    target.copy(group, [(k, changed[k]) for k in rest if k not in last])
    target.copy(group, [(k, changed[k]) for k in last])
    if last and GROUP_JSON not in before.files:
        # As after every first commit: else to lose the file would look like one that was cut off.
        target.write_manifest(name, in_two_lines(after, after))
    target.delete(group, gone)


def state_there(target: Target, name: str, group: str) -> State:
    """Return what a group over there is, also where whoever brought it was killed on the way.

    Raises:
        StoreDamaged: its manifest is damaged.
    """
    data = target.read_manifest(name)
    if data is None:
        return State()
    known = Manifest(Path(f"{name}.log"), data)
    if known.damage or known.torn:
        raise StoreDamaged(f"{name}.log over there is damaged: {[*known.damage, 'torn'][0]}")
    found = target.version(group, GROUP_JSON)
    if found == known.state.files.get(GROUP_JSON) or GROUP_JSON not in known.replaced:
        target.delete(group, sorted(known.replaced.keys() - known.state.files.keys()))
        return known.state
    state = known.rolled_back()
    for key in known.replaced.keys() & state.files.keys():
        there = target.version(group, key)
        if there in known.versions(key) and there is not None:
            state.files[key] = there
    return state


def _progress(state: State) -> tuple[object, ...]:
    consumed = {k: (c.through, c.ahead) for k, c in state.consumed.items()}
    return state.sizes, consumed
