"""The parser of a verb's words: what it does not know it answers with what may be meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ddpprobe.reader.text import plain


class VerbParser(argparse.ArgumentParser):
    """A parser that names the nearest option, under the usage of the verb that was typed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (those of argparse)
        super().__init__(*args, **kwargs)
        # argparse would say "invalid int value".
        self.register("type", int, _whole)
        self.register("type", float, _number)
        # argparse would forget the first of two values.
        for action in (None, "store"):
            self.register("action", action, _Once)

    def error(self, message: str) -> NoReturn:
        """Show the usage and what is wrong; exits with 2."""
        if message == "argument --steps: expected one argument":  # "-5:" looks like an option
            message += "; steps count from 0: type --steps A:B, such as --steps 0:100"
        super().error(message)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Show the usage of this verb, and say which of its options may be meant; exits with 2."""
        names = (word.partition("=")[0] for word in words if word.startswith("-"))
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = [found for name in names for found in nearest(f"--{name.lstrip('-')}", known)]
        self.error(f"unrecognized arguments: {plain(' '.join(words))}{did_you_mean(near)}")


class _Once(argparse.Action):
    """Stores a value; an option that is given again is refused. Parse one command line with it."""

    _is_given = False

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        """Take the value of the option, or of an argument without one."""
        if self._is_given and option_string is not None:
            raise argparse.ArgumentError(self, "given twice, and takes one value: type it once")
        self._is_given = True
        setattr(namespace, self.dest, values)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the one of a few names that a word was most likely meant to be, if there is one."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)


def did_you_mean(names: Iterable[str]) -> str:
    """Return the end of an error that proposes names; "" without any."""
    told = ", ".join(dict.fromkeys(names))
    return f"; did you mean {told}?" if told else ""
