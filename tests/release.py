"""Whether a commit may be released under a tag: `python tests/release.py v1.2.3`.

The versions of pyproject.toml and of the package, and a section of the changelog, have to say what
the tag says, and pyproject.toml where the project lives. It needs nothing but Python, so that a
release workflow can begin with it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, root: Path = ROOT) -> Iterator[str]:
    """Yield what speaks against it, each with what to do."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        yield f"expected a tag like v1.2.3 or v1.2.3rc1, got {tag!r}"
        return
    version = tag.removeprefix("v")
    parsed = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    project = parsed["version"]
    if project != version:
        yield f"pyproject.toml says version {project}: write {version}, or another tag"
    package = re.search(
        r'^__version__ = "(.*)"$', (root / "ddpprobe/__init__.py").read_text(), re.MULTILINE
    )
    if package is None or package[1] != version:
        said = package and package[1]
        yield f"ddpprobe/__init__.py says version {said}: write {version}, or another tag"
    if not parsed.get("urls"):
        yield "pyproject.toml has no [project.urls]: PyPI shows nobody where source and issues are"
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)}( |$)", changes, re.MULTILINE):
        yield (
            f'CHANGELOG.md has no section "## {version} - YYYY-MM-DD": what is below '
            '"## Unreleased" goes there'
        )


def main(words: list[str]) -> int:
    """Print the problems; 1 if there are any, 2 without a tag."""
    if len(words) != 1:
        print("expected one tag: python tests/release.py v1.2.3", file=sys.stderr)
        return 2
    found = list(problems(words[0]))
    for problem in found:
        print(problem, file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
