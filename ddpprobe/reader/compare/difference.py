"""What a comparison of two runs says: where they part, and how far they are apart then."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpprobe.records.step import Site

BEFORE_ALL = -1  # in the order of a step: what is given to the model
VALUE, PRESENT = "value", "present"  # of a scalar; of a site that one record has not


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where the runs differ by more than is allowed.

    Attributes:
        step: optimizer step.
        order: place in the execution order of the step (the first run's); scalars come last, but
            for those of the input, which come first.
        site: where; None for a scalar.
        scalar: its name, "" for a site; `rank`: whose it is, None for the mean over all ranks.
        stat: of `records.STATS`; "value" of a scalar; "present" for a site that is in the records
            of both runs, but not of both at this step.
        a, b: the numbers; NaN where there is none, of a scalar where it is NaN.
        excess: difference / allowed difference; infinite where equality was due.
    """

    step: int
    order: int
    site: Site | None
    scalar: str
    rank: int | None
    stat: str
    a: float
    b: float
    excess: float

    @property
    def when(self) -> tuple[int, int]:
        """The order of differences."""
        return self.step, self.order


@dataclass(frozen=True, slots=True)
class Growth:
    """How far the runs are apart at one step.

    Attributes:
        step: optimizer step.
        apart, compared: number of sites beyond what is allowed, and of all.
        worst: the site with the largest `excess`; None if none differs.
        a, b: loss, as the mean over the ranks; None where none was given.
    """

    step: int
    apart: int
    compared: int
    worst: Site | None
    excess: float
    a: float | None
    b: float | None


@dataclass(slots=True)
class Comparison:
    """What came out.

    Attributes:
        steps: number of sampled steps compared; `first` and `last` of them.
        only: number of sampled steps that one run has and the other has not.
        torn: number of steps that both have, and that never came to their end in one of them.
        sites: number of sites compared.
        differences: the first one of each site and scalar, earliest first.
        agreed: the last compared step before the first difference; None if there is none.
        growth: at the first difference, at the compared steps 1, 2, 4, 8, ... after it, at the
            last.
        nearest: what came closest to what is allowed without reaching it.
        alone: sites, and names of scalars, that one run has in no compared step, and the other has.
        renamed: guesses which of these are one tensor under two names.
        recast: sites -> what they are in the other run, where that has another dtype.
        left_out: why something was at no step compared -> sites, names of scalars, and kinds as
            globs (`*:param`).
        incomplete: compared steps at which a rank of either run is missing.
    """

    steps: int = 0
    first: int | None = None
    last: int | None = None
    only: list[int] = field(default_factory=lambda: [0, 0])
    torn: list[int] = field(default_factory=lambda: [0, 0])
    sites: int = 0
    differences: list[Difference] = field(default_factory=list)
    agreed: int | None = None
    growth: list[Growth] = field(default_factory=list)
    nearest: Difference | None = None
    alone: tuple[list[Site | str], list[Site | str]] = field(default_factory=lambda: ([], []))
    renamed: list[tuple[Site, Site]] = field(default_factory=list)
    recast: dict[Site, Site] = field(default_factory=dict)
    left_out: dict[str, list[Site | str]] = field(default_factory=dict)
    incomplete: int = 0
