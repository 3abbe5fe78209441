"""The command `ddpprobe`: one verb a file in `commands/`; errors become exit codes here only."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from ddpprobe.cli import completion
from ddpprobe.cli.fetching import fetch
from ddpprobe.cli.output import (
    DAMAGED,
    INTERRUPTED,
    OK,
    PIPE_CLOSED,
    USAGE,
    complain,
    discard_stdout,
    flush,
    say,
)
from ddpprobe.cli.run_argument import choose
from ddpprobe.cli.verb_parser import VerbParser, did_you_mean, nearest
from ddpprobe.cli.verbs import ANYWHERE, HERE, VERBS, exits
from ddpprobe.errors import RunError, StoreDamaged
from ddpprobe.reader.text import plain

NEWEST = """\
Without it the newest run is taken, of those that `ddpprobe ls` lists, and named on stderr."""
RUN = {
    HERE: f"""\
RUN is a run directory: what install() made, by default ddpprobe-runs/<name>.
{NEWEST}""",
    ANYWHERE: f"""\
RUN is a run directory: what install() made, by default ddpprobe-runs/<name>; or the URL of an
object store that it was uploaded to: s3://BUCKET/PREFIX/RUN, gs://..., az://...
{NEWEST}""",
}


def epilog(verb: str | None = None) -> str:
    """Return the end of the help: exit codes, of the whole command line or of one verb."""
    lines = [f"  {code}  {meaning}" for code, meaning in exits(verb)]
    about = RUN.get(ANYWHERE if verb is None else VERBS[verb].run)
    codes = "\n".join(["exit codes (3 goes before 1, and 1 before 4):", *lines])
    return f"{codes}\n\n{about}" if about else codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for what a user can cause."""
    _open_closed_streams()
    _buffer_stdout()
    if completion.is_asked():
        completion.answer(_parsers(completion.verb_of())[0])
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except SystemExit as done:  # argparse has printed the help, or what was wrong
        return done.code if isinstance(done.code, int) else OK


def _open_closed_streams() -> None:
    """Open what a shell has closed (`>&-`), so that an exit code is that of what was found."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  (to the end)
            setattr(sys, name, stream)


def _buffer_stdout() -> None:
    """Give stdout the buffer that PYTHONUNBUFFERED took away.

    Without one what a pipe takes only in part is lost unseen, and so is that its reader went.
    """
    told, is_own = sys.stdout, sys.stdout is sys.__stdout__  # and no caller's
    raw = getattr(told, "buffer", None)
    if is_own and isinstance(raw, io.RawIOBase):
        whole = io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(whole, told.encoding, told.errors, line_buffering=True)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser, verbs = _parsers(next((word for word in words if word in VERBS), None))
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        hint = did_you_mean(nearest(words[0], VERBS)) or f"; choose one of {', '.join(VERBS)}"
        parser.error(f"no verb {plain(words[0])!r}{hint}")
    args, rest = parser.parse_known_args(words)
    if rest and args.verb != "daemon":  # whose options are the daemon's own business
        verbs[args.verb].refuse(rest)
    args.rest = rest
    return args


def _parsers(chosen: str | None) -> tuple[VerbParser, Mapping[str, VerbParser]]:
    """Return the parser of a command line with this verb, and those of all verbs.

    No other verb's module is imported: the others' have no arguments.
    """
    parser = VerbParser(
        prog="ddpprobe",
        description="Names the first bad tensor of a distributed PyTorch run.",
        epilog=epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for name, known in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=known.help,
            epilog=epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=name != "daemon",
        )
        if name == chosen:
            module = _module(name)
            verb.description = (module.__doc__ or "").strip()
            module.add_arguments(verb)
    return parser, verbs.choices


class _Version(argparse.Action):
    """Shows the version; a plain `action="version"` would look it up before it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # noqa: PLC0415  (slow, and seldom asked for)

        say(f"ddpprobe {version('ddpprobe')}")
        parser.exit()


def _run(words: Sequence[str]) -> int:
    """Run a verb: the only place where an error becomes an exit code."""
    try:
        code = _carry_out(words)
    except BrokenPipeError:
        discard_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except RunError as error:
        complain(f"ddpprobe: {plain(error)}")
        return error.exit_code
    except OSError as error:
        complain(f"ddpprobe: {plain(error)}")
        return USAGE
    return code


def _carry_out(words: Sequence[str]) -> int:
    try:
        args = _parse(words)
        choose(args)
        fetch(args)
        code = int(_module(args.verb).run(args))
    except StoreDamaged as error:
        raise RunError(f"{args.run}: {error}", exit_code=DAMAGED) from error
    except SystemExit:
        flush()  # argparse swallows what it meets as it prints the help
        raise
    flush()  # a closed pipe shows here, not at the interpreter's exit
    return code


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"ddpprobe.cli.commands.{name}")
