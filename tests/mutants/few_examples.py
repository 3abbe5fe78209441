"""A plugin of pytest: the same few examples of every property, and no deadline for one.

Hypothesis draws a hundred, others each time. A mutant that only some draws notice would survive
now and then, and a hundred take most of the time of a run.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile(
    "mutants", deadline=None, derandomize=True, database=None, max_examples=25
)
settings.load_profile("mutants")
