"""The groups of the store that one process each has written, carried as they are.

Which files a group consists of, its manifest says; which of several copies of a group is the
newest, the progress in it. A file is taken from whoever holds those very bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ddpprobe.errors import StoreDamaged
from ddpprobe.reader.collect.place import Place
from ddpprobe.reader.collect.report import Collected
from ddpprobe.rundir import safe_read
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.commit import metadata_last
from ddpprobe.store.group_names import MANIFEST, ROOT, group_of, key_of, log_of
from ddpprobe.store.manifest import (
    GROUP_JSON,
    MAX_LOG_BYTES,
    Manifest,
    State,
    Version,
    in_two_lines,
    is_settled,
    version_of,
)
from ddpprobe.store.remote.carry import carry
from ddpprobe.store.remote.local_group import LocalGroup, is_usual, version_at

Content = Callable[[str, str, Version], bytes | None]  # group, key, version: the bytes, if anywhere


def names_in(runs: Sequence[RunDir]) -> list[str]:
    """Return the names of the manifests of groups with one writer, ascending."""
    found = set()
    for run in runs:
        for file in run.manifest_names():
            name = file.removesuffix(".log")
            match = MANIFEST.fullmatch(name) if file.endswith(".log") else None
            if match and not match[4] and not name.endswith(".captures"):
                found.add(name)
    return sorted(found)


class CollectedGroup(LocalGroup):
    """A group of the result, as a place that it is carried to.

    Args:
        place: where the result is.
        content: gives the bytes of a file.
    """

    def __init__(self, place: Place, content: Content) -> None:
        super().__init__(place.run)
        self._place, self._content = place, content

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file, all at once."""
        self._place.keep(path, data)

    def copy(self, group: str, files: Sequence[tuple[str, Version]]) -> None:
        """Bring files here, as far as somebody has them."""
        known = {k for k, _ in files}
        for key, version in files:
            if is_usual(key, known) and self.version(group, key) != version:
                data = self._content(group, key, version)
                if data is not None:
                    self.put(self.run.path / key_of(group, key), data)

    def become(self, name: str, after: State) -> None:
        """Make the group what `after` says, as far as somebody has its files."""
        group, _ = group_of(name)
        words = in_two_lines(after, after)
        if self.read_manifest(name) == words:  # what an earlier collection missed may be had now
            files = sorted(after.files.items(), key=lambda file: metadata_last(file[0]))
            self.copy(group, files)
            return
        carry(self, name, group, after, self.here(name, group))
        # In the same words whatever it was before: collected at once or bit by bit is the same.
        self.write_manifest(name, words)


def bring(place: Place, sources: Sequence[RunDir], name: str, report: Collected) -> None:
    """Carry a group to the result.

    Args:
        place: where to.
        sources: of what is not there yet.
        name: of its manifest.
        report: told what is damaged.
    """
    states: list[tuple[RunDir, State]] = []
    problems = []
    for run in (place.run, *sources):
        try:
            state = state_of(run, name)
        except StoreDamaged as error:
            if run is not place.run:
                problems.append(f"{run.path / log_of(name)}: {error}")
            continue
        if state is not None:
            states.append((run, state))
    report.say(problems, found=bool(states))
    if not states:
        _keep_damaged(place, sources, name)
        return
    after = max((state for _, state in states), key=progress)

    def content(group: str, key: str, version: Version) -> bytes | None:
        holders = [run for run, state in states if state.files.get(key) == version]
        report.advance(1)
        return content_of([r for r in holders if r is not place.run], group, key, version, report)

    CollectedGroup(place, content).become(name, after)


def content_of(
    holders: Sequence[RunDir], group: str, key: str, version: Version, report: Collected
) -> bytes | None:
    """Return the bytes of a file from the first of these that has them; None if none has."""
    problems: list[str] = []
    for run in holders:
        path = run.path / key_of(group, key)
        try:
            root = run.store / group if group else run.store
            data = safe_read.read_regular(root, key)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            problems.append(f"{path}: {why or error}")
            continue
        if version_of(data) == version:
            report.say(problems, found=True)
            return data
        problems.append(f"{path}: it is not what was committed")
    report.say(problems, found=False)
    return None


def state_of(run: RunDir, name: str) -> State | None:
    """Return what a group of a run is; None: nothing was ever committed to it.

    Raises:
        StoreDamaged: its manifest is damaged.
    """
    manifest = Manifest(run.path / log_of(name))
    if manifest.damage:
        raise StoreDamaged(manifest.damage[0])
    group, _ = group_of(name)
    try:
        settled = is_settled(run.store / group if group else run.store, manifest)
    except (StoreDamaged, OSError):
        settled = True  # its metadata is damaged: somebody else may have it
    state = manifest.state
    if not settled or manifest.undone:
        # Its writer was killed in a commit, and both versions of a file stand for the one before.
        state = state if settled else manifest.rolled_back()
        for key in manifest.replaced.keys() & state.files.keys():
            version = version_at(run, group, key)
            if version is not None and version in manifest.versions(key):
                state.files[key] = version
    return state if GROUP_JSON in state.files else None


def progress(state: State) -> tuple[int, int, bytes]:
    """Return what is larger for the newer one of two states of a group; equal, the same state."""
    taken = sum(c.through + len(c.ahead) for c in state.consumed.values())
    return taken, sum(state.sizes.values()), in_two_lines(state, state)


def bring_root(place: Place, staged: dict[str, bytes]) -> None:
    """Write the root of the result."""
    files = {key: version_of(data) for key, data in staged.items()}
    target = CollectedGroup(place, lambda _, key, __: staged[key])
    target.become(ROOT, State(files=files))


def _keep_damaged(place: Place, sources: Sequence[RunDir], name: str) -> None:
    """Keep a damaged list of files as it is: a reader of the result says what it says of it."""
    for data in _logs(sources, name):
        place.keep(place.run.path / log_of(name), data)
        return


def _logs(sources: Sequence[RunDir], name: str) -> Iterator[bytes]:
    for run in sources:
        try:
            yield safe_read.read_regular(run.path, log_of(name), MAX_LOG_BYTES)
        except OSError:
            continue
