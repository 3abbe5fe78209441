"""All models that there are, by their title."""

from __future__ import annotations

from collections.abc import Iterable

from tests.models.families import diffusers, peft, plain, timm, torchvision, transformers
from tests.models.training import Architecture

FAMILIES: tuple[Iterable[Architecture], ...] = (
    plain.MODELS, transformers.MODELS, timm.MODELS, torchvision.MODELS, diffusers.MODELS,
    peft.MODELS,
)  # fmt: skip
ARCHITECTURES = {one.title: one for family in FAMILIES for one in family}


def find(title: str) -> Architecture:
    """Return the model of this title."""
    return ARCHITECTURES[title]
