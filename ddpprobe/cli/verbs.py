"""The verbs of the command line: what each is for in one line, and how it can end.

A verb is a line here and a file of that name in `commands/`, which is imported only when the verb
is used: help costs the import of none.
"""

from __future__ import annotations

from typing import NamedTuple

from ddpprobe.cli.output import DAMAGED, INCOMPLETE, OK, PAGED, USAGE


class Verb(NamedTuple):
    """A verb.

    Attributes:
        help: its line in the help, the first of its module's docstring.
        codes: its exit codes.
        run: what its argument RUN may be: `HERE`, `ANYWHERE`, or "" if it takes none.
        wrong_use: what its exit code 2 means, if not what it means of most.
    """

    help: str
    codes: tuple[int, ...]
    run: str = ""
    wrong_use: str = ""


HERE = "here"  # a directory: what the verb does, or shows, is where the run's daemon is
ANYWHERE = "anywhere"  # a directory, or the URL of an object store


# What the exit codes mean; the help of each verb and docs/reference/cli.md are made of these.
MEANINGS = {
    OK: "nothing wrong",
    PAGED: "a page was found, whatever --level shows",
    USAGE: "wrong use: an unknown option, site, statistic or rank; a missing, empty or foreign "
    "directory",
    DAMAGED: "damaged: what can be read is shown, each thing that is lost is a line on stderr",
    INCOMPLETE: "only a part of the run is held, or how it ended is not known; each gap is a line "
    "on stderr",
}
_READS = (OK, USAGE, DAMAGED, INCOMPLETE)
VERBS = {
    "ls": Verb(
        "List the runs below a directory, newest first: how each ended, and what went wrong first",
        (OK, USAGE),
        wrong_use="wrong use: an unknown option, or no such directory",
    ),
    "info": Verb(
        "Say what ran: ranks, topology, steps, sites, sizes, and how complete each rank's record "
        "is",
        _READS,
        ANYWHERE,
    ),
    "anomalies": Verb(
        "Say what went wrong in a run, first cause first, then what followed from it",
        (OK, PAGED, USAGE, DAMAGED, INCOMPLETE),
        ANYWHERE,
    ),
    "trace": Verb(
        "Show numbers over the steps: loss and gradient norm, any scalar, or a statistic of sites",
        _READS,
        ANYWHERE,
    ),
    "verify": Verb(
        "Check every file of a run against its checksum, and the journals against the store",
        _READS,
        ANYWHERE,
    ),
    "collect": Verb(
        "Merge the directories of a run's nodes, each of which had its own disk, into one",
        (OK, USAGE, DAMAGED),
    ),
    "compare": Verb(
        "Name the first step, site and statistic where two runs part", _READS, ANYWHERE
    ),
    "baseline": Verb(
        "Say where a run is outside of what good runs of the same job did", _READS, ANYWHERE
    ),
    "top": Verb(
        "Watch a run while it trains: its ranks, its worst modules, its anomalies", _READS, HERE
    ),
    "replay": Verb(
        "Ask a run again: its detectors with other settings, or one module from its stored inputs",
        _READS,
        ANYWHERE,
    ),
    "report": Verb(
        "Write one self-contained HTML page: verdict, timeline, heat map module x step, ranks, "
        "hosts",
        _READS,
        ANYWHERE,
    ),
    "export": Verb(
        "Write a run in a format of others, or serve it: so the same Grafana dashboard shows a "
        "past run",
        _READS,
        ANYWHERE,
    ),
    "trigger": Verb(
        "Capture the next steps of a live run in full, on all ranks, and keep the window before "
        "them",
        (OK, USAGE, DAMAGED),
        HERE,
    ),
    "run": Verb(
        "Start a job whose script says nothing of ddpprobe, and observe what it trains",
        (OK, USAGE),
        wrong_use="wrong use: an unknown option, or no command; any other code is the job's, and "
        "127 or 126 says that it could not be started",
    ),
    "daemon": Verb(
        "Run the node daemon by hand or as a service; training that finds one running starts none",
        (OK, USAGE),
    ),
    "up": Verb(
        "Watch all runs with Prometheus, and notify a webhook of what is wrong with them",
        (OK, USAGE),
        wrong_use="wrong use: an unknown option, an address that is none, a port that is taken, a "
        "directory that cannot be written; or a server ended by itself",
    ),
}


def exits(verb: str | None = None) -> list[tuple[int, str]]:
    """Return the exit codes that a verb can end with (None: any), and what each means."""
    codes = MEANINGS if verb is None else VERBS[verb].codes
    own = {} if verb is None else {USAGE: VERBS[verb].wrong_use}
    return [(code, own.get(code) or MEANINGS[code] + _only(code, verb)) for code in codes]


def _only(code: int, verb: str | None) -> str:
    """Name the verbs that a code is of, where it is not of all that have to do with a run."""
    who = [name for name, its in VERBS.items() if code in its.codes]
    return f" (only {', '.join(who)})" if verb is None and len(who) == 1 else ""
