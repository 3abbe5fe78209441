"""How two ranks can have ended, side by side: `survey.txt` keeps what each such end is taken for.

First each by itself. Then a line is a pair of ends, with + where a third rank was told to stop. A
column is what is known of the two: where they were (both as far, the first or the second one
behind, both between two steps), and in which order they were seen (? not, 0 together, 1 or 2 the
first or the second one before). Which of these are right, the cases of `test_judge` say; the survey
shows what a change to the judge reaches beyond them. After one that is meant:
`python -m tests.ends.test_survey`, and read the difference.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

from ddpprobe.ends.anomalies import anomalies_of
from ddpprobe.ends.judge import judge
from ddpprobe.records.fate import Fate

from .test_judge import GONE, OWN, PREEMPTED, REFUSED, Case, at, fate, left, raised

FILE = Path(__file__).parent / "survey.txt"
ENDS = {
    "SIGKILL": fate(0, "SIGKILL"),
    "SIGTERM": fate(0, "SIGTERM"),
    "SIGSEGV": fate(0, "SIGSEGV"),
    "SIGABRT": fate(0, "SIGABRT"),
    "unseen": fate(0),
    "exit:0": fate(0, "exit:0"),
    "exit:3": fate(0, "exit:3"),
    "closed": fate(0, "exit:0", closed=True),
    "left": left(0, at(12)),
    "may-stop": fate(0, "exit:3", sets_handlers=True),
    "raised": raised(0, OWN),
    "broken": raised(0, GONE),
    "refused": raised(0, REFUSED),
    "asked": raised(0, PREEMPTED),
    "stopped": fate(0, "SIGKILL", suspended=True),
    "stands": fate(0, stalled=True),
    "paused": fate(0, paused=True),
}
PLACES = {"=": (at(12), at(12)), "<": (at(12), at(12, "backward")),
          ">": (at(12, "backward"), at(12)), "|": (at(12, "data"), at(12, "data"))}  # fmt: skip
ORDERS = {"?": (-1, -1), "0": (0, 0), "1": (0, 1), "2": (1, 0)}
LETTERS = {"crashed": "c", "stopped": "s", "hung": "h", "vanished": "v", "ended": "e",
           "unknown": "u", "running": "r"}  # fmt: skip


def pair(names: tuple[str, str], place: str, order: str) -> tuple[Fate, Fate]:
    """Return two ranks that ended so, where they were and in which order they were seen."""
    first, second = (
        replace(ENDS[name], rank=rank, clock=clock, order=at_, witness="w" if at_ >= 0 else "")
        for rank, (name, clock, at_) in enumerate(
            zip(names, PLACES[place], ORDERS[order], strict=True)
        )
    )
    return first, second


def verdict(*fates: Fate) -> str:
    """Return what a job is taken for whose ranks ended so: a letter, and whom it blames."""
    end = judge(Case(tuple(sorted(fates, key=lambda f: f.rank))))
    ways = {f.how for f in fates} | {f.error.type for f in fates if f.error}
    named = {"unknown", "hang", "SIGSTOP", *ways} - {""}
    assert any(way in end.how for way in named) == (end.state not in ("ended", "running"))
    return LETTERS[end.state] + "".join(map(str, end.ranks))


def survey() -> str:
    """Return the table: of the pair, and of it with a third rank that was told to stop."""
    columns = [place + order for place, order in product(PLACES, ORDERS)]
    third = fate(2, "SIGTERM", at(12, "backward"))
    lines = [" " * 24 + f"{'alone':<12}beside one of whom nothing is known"]
    for name, alone in ENDS.items():
        lines.append(f"{name:<24}{verdict(alone):<12}{verdict(alone, Fate(1))}")
    lines += ["", " " * 24 + "".join(f"{column:<6}" for column in columns)]
    for names in combinations_with_replacement(ENDS, 2):
        for more in ((), (third,)):
            found = [verdict(*pair(names, *column), *more) for column in columns]
            text = "  ".join(names) + ("  +" if more else "")
            lines.append(f"{text:<24}" + "".join(f"{each:<6}" for each in found))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_every_pair_of_ends_is_taken_for_what_it_was_before() -> None:
    assert survey().splitlines() == FILE.read_text().splitlines()


def test_it_makes_no_difference_which_rank_is_which() -> None:
    mirrored = {"=": "=", "<": ">", ">": "<", "|": "|"}, {"?": "?", "0": "0", "1": "2", "2": "1"}
    for names, place, order in product(product(ENDS, ENDS), PLACES, ORDERS):
        one = verdict(*pair(names, place, order))
        other = verdict(*pair(names[::-1], mirrored[0][place], mirrored[1][order]))
        swapped = "".join(sorted(other[1:].translate(str.maketrans("01", "10"))))
        assert one == other[0] + swapped, (names, place, order)


def test_of_ranks_that_never_told_where_they_are_the_ends_are_told_as_well() -> None:
    nowhere = (None, None), (at(12), None), (None, at(12))
    for names, clocks, order in product(product(ENDS, ENDS), nowhere, ORDERS):
        fates = tuple(
            replace(one, clock=clock)
            for one, clock in zip(pair(names, "=", order), clocks, strict=True)
        )
        case = Case((*fates, fate(2, "SIGTERM"), Fate(3)))
        end = judge(case)
        told = anomalies_of(end, case, 0)
        assert {one.rank for one in told} <= {None, 0, 1, 2}
        assert all(one.step in (0, 12) and one.message for one in told), names
        assert end.step in (None, 12)


if __name__ == "__main__":
    FILE.write_text(survey())
