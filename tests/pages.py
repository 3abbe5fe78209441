"""The blocks of code in the documents that a user reads first: the README, how-to pages, tutorial.

A block is carried out by a test, or a comment in the line above it says why not:

    <!-- illustration: needs a bucket -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1]
PAGES = [HOME / "README.md", *sorted(HOME.glob("docs/how-to/*.md")),
         *sorted(HOME.glob("docs/tutorial/*.md"))]  # fmt: skip
_BLOCK = re.compile(
    r"^(?: *<!-- illustration: (?P<reason>[^\n]*) -->\n)?"
    r"(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: path below the repository, without `.md`.
        kind: language of the fence; "" where none is said.
        reason: why it is not carried out; "" if it is.
    """

    page: str
    kind: str
    text: str
    reason: str = ""

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command after a prompt, and what is printed below it."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        return [(words, printed) for words, _, printed in (p.partition("\n") for p in parts)]


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the blocks of a text."""
    return [Block(page, m["kind"], m["text"], m["reason"] or "") for m in _BLOCK.finditer(text)]


def blocks(page: str = "") -> list[Block]:
    """Return the blocks of a page, or of all of them."""
    found = []
    for path in PAGES:
        name = path.relative_to(HOME).with_suffix("").as_posix()
        if page in {"", name}:
            found += blocks_of(name, path.read_text())
    return found


def ddpprobe_words(command: str) -> Iterator[list[str]]:
    """Yield what follows `ddpprobe` in each part of a shell line that calls it."""
    command = re.sub(r"\$\([^)]*\)", "HERE", command)  # what a shell puts there
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    part: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= set("|&;"):
            if part[:1] == ["ddpprobe"]:
                yield part[1:]
            part = []
        else:
            part.append(word)
