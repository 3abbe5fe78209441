"""The parser of a verb's words: what it does not know it answers with what may be meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from ddpprobe.reader.text import plain


class VerbParser(argparse.ArgumentParser):
    """A parser that names the nearest option, under the usage of the verb that was typed."""

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Show the usage of this verb, and say which of its options may be meant; exits with 2."""
        names = (word.partition("=")[0] for word in words if word.startswith("-"))
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = [found for name in names for found in nearest(f"--{name.lstrip('-')}", known)]
        self.error(f"unrecognized arguments: {plain(' '.join(words))}{did_you_mean(near)}")


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the one of a few names that a word was most likely meant to be, if there is one."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)


def did_you_mean(names: Iterable[str]) -> str:
    """Return the end of an error that proposes names; "" without any."""
    told = ", ".join(dict.fromkeys(names))
    return f"; did you mean {told}?" if told else ""
