"""What goes wrong between a user and a capture."""

from __future__ import annotations


class CaptureError(ValueError, RuntimeError):
    """A capture cannot give what was asked; the text says why and what to type instead."""


class UnknownName(CaptureError, KeyError):
    """There is no captured module of this name; the text lists close ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it
