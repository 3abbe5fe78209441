"""What the command line prints and exits with, word by word: scripts read it."""

from __future__ import annotations

import importlib.metadata
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddpprobe.cli import completion, main, output
from ddpprobe.cli.commands import anomalies, info
from ddpprobe.cli.progress import Bar
from ddpprobe.cli.verbs import ANYWHERE, MEANINGS, VERBS, exits
from ddpprobe.detectors.suite import Episode
from ddpprobe.ends.end import ENDED, HUNG, UNDECIDED, End
from ddpprobe.ends.evidence import Case
from ddpprobe.errors import RunError, StoreDamaged
from ddpprobe.reader.completeness import Completeness, RankShare
from ddpprobe.reader.endings import Ending
from ddpprobe.reader.rank_status import CLOSED, RUNNING, UNKNOWN
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir, make_dir, write_json

from ..made_runs import ANOMALY
from .test_main import BAD, damage, make_run

Call = Callable[..., tuple[int, str, str]]
NO_RUN = ("ls", "collect", "run", "daemon", "up")
WHERE = "journal/000/node_0000/rank_00001/00000000.wal"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=4)


def test_verify_of_a_whole_run_is_one_line_or_one_object(call: Call, run: Path) -> None:
    said = "all intact: 0 files of the store and 14 journal frames checked\n"
    assert call("verify", run) == (0, said, "")
    code, out, err = call("verify", run, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "run": "tiny", "format_version": 1, "ok": True, "files": 0, "frames": 14, "notes": [],
        "damage": [],
    }  # fmt: skip
    assert out.startswith('{\n  "run": "tiny",\n')  # for a person, too


def test_verify_of_a_damaged_run_lists_each_thing_and_exits_with_3(call: Call, run: Path) -> None:
    code, out, err = call("verify", damage(run))
    assert (code, out) == (
        3, "1 damaged or missing: 0 files of the store and 10 journal frames checked\n",
    )  # fmt: skip
    lost, *unknown = err.splitlines()
    why = lost.removeprefix(f"ddpprobe: lost: {WHERE}: ")
    assert why.startswith("checksum mismatch at byte ")
    assert unknown == [
        "ddpprobe: not known: rank 1: 1 of 4 sampled steps are held, the last one step 0",
        (
            "ddpprobe: not known: rank 1: how it ended is not known; 1 sampled step is held, the "
            "last one step 0"
        ),
    ]
    code, out, err_too = call("verify", run, "--json")
    assert (code, err_too) == (3, err)
    found = json.loads(out)
    assert found["damage"] == [{"where": WHERE, "steps": None, "why": why}]
    assert (found["ok"], found["frames"]) == (False, 10)


def test_verify_tells_a_torn_tail_as_a_note(call: Call, run: Path) -> None:
    path = run / WHERE
    path.write_bytes(path.read_bytes()[:-7])
    code, out, _ = call("verify", run)
    note, found = out.splitlines()
    assert code == 4
    assert note.startswith(f"note: {WHERE}: ")
    assert note.endswith(" bytes of a frame that was not finished")
    assert found == "all intact: 0 files of the store and 13 journal frames checked"
    assert json.loads(call("verify", run, "--json")[1])["notes"] == [note.removeprefix("note: ")]


def test_no_anomalies_is_not_said_of_a_damaged_run(call: Call, run: Path) -> None:
    code, out, _ = call("anomalies", damage(run))
    said = "nothing found in what is held: 1 of 4 sampled steps of all ranks\n"
    assert (code, out) == (3, said)


def damage_beside(run: Path) -> Path:
    """Damage a daemon's journal: all that the ranks wrote is there."""
    journal = RunDir(run).daemon_journal(0, "node_0000")
    writer = JournalWriter(journal, {"role": "daemon", "world_size": 2})
    for _ in range(3):
        writer.append_json(framing.LIFE, {"event": "closed", "status": "ok"})
    writer.close()
    (segment,) = journal.glob("*.wal")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    return run


def test_damage_beside_the_ranks_leaves_their_verdicts_and_qualifies_them(
    call: Call, run: Path, tmp_path: Path
) -> None:
    code, out, _ = call("anomalies", damage_beside(run))
    said = "nothing found in what is held: 4 of 4 sampled steps of all ranks\n"
    assert (code, out) == (3, said)
    sick = make_run(tmp_path / "sick", BAD)
    code, out, err = call("anomalies", damage_beside(sick))
    assert (code, err.startswith("ddpprobe: lost: ")) == (3, True)
    assert out.endswith("\njudged: what is held, 40 of 40 sampled steps of all ranks\n")


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_of_which_nothing_is_held_is_never_green(
    begun: bool, call: Call, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run") if begun else make_dir(tmp_path / "run")
    if begun:
        shutil.rmtree(run / "journal")
    else:  # its first rank has written this and nothing else
        write_json(RunDir(run).run_json, {"format_version": 1, "name": "tiny", "world_size": 2})
    unknown = (
        "ddpprobe: not known: nothing is held of any rank: none has begun, or its journals and "
        "store are gone\n"
    )
    said = "nothing found in what is held: no sampled step of all ranks\n"
    assert call("anomalies", run) == (4, said, unknown)
    code, out, _ = call("anomalies", run, "--json")
    found = json.loads(out)
    assert (code, found["end"], found["judged"]["complete"]) == (4, None, False)
    assert call("verify", run)[0] == 4


def held(*shares: tuple[int, int], end: str = CLOSED, live: bool = False) -> Completeness:
    """Return what is held of ranks: of each the sampled steps that are held, and that it took."""
    ranks = tuple(
        RankShare(0, rank, *share, last_held=None, reached=None, end=end)
        for rank, share in enumerate(shares)
    )
    return Completeness(ranks, {0: len(ranks)}, live)


ONE, WHOLE, PART = held((1, 1)), held((9, 9), (9, 9)), held((9, 9), (3, 9))
LIVE, NONE = held((9, 9), end=RUNNING, live=True), held((0, 2))
MUTE = held((9, 9), end=UNKNOWN)


@pytest.mark.parametrize(
    ("known", "damaged", "hidden", "said"),
    [
        (WHOLE, False, 0, "no anomalies in 9 sampled steps"),
        (ONE, False, 0, "no anomalies in 1 sampled step"),
        (LIVE, False, 0, "no anomalies so far in 9 sampled steps"),
        (WHOLE, False, 2, "no anomalies at level page or above (2 below) in 9 sampled steps"),
        (WHOLE, True, 0, "nothing found in what is held: 9 of 9 sampled steps of all ranks"),
        (MUTE, False, 0, "nothing found in what is held: 9 of 9 sampled steps of all ranks"),
        (PART, False, 0, "nothing found in what is held: 3 of 9 sampled steps of all ranks"),
        (
            PART,
            False,
            1,
            (
                "nothing found at level page or above (1 below) in what is held: 3 of 9 sampled "
                "steps of all ranks"
            ),
        ),
        (NONE, False, 0, "nothing found in what is held: no sampled step of all ranks"),
        (held((0, 0)), False, 0, "nothing to judge: no step was sampled"),
        (held((0, 0)), True, 0, "nothing found in what is held: no sampled step of all ranks"),
        (
            held((0, 0), end=UNKNOWN),
            False,
            0,
            "nothing found in what is held: no sampled step of all ranks",
        ),
    ],
)
def test_that_nothing_was_found_is_said_of_what_was_judged(
    known: Completeness, damaged: bool, hidden: int, said: str
) -> None:
    assert anomalies.nothing(known, damaged, hidden, "page") == said


def test_beside_verdicts_it_is_said_how_much_was_judged() -> None:
    part = "judged: what is held, {} of all ranks"
    for known, damaged, said in (
        (WHOLE, False, "judged: 9 sampled steps"),
        (LIVE, False, "judged: 9 sampled steps so far"),
        (ONE, False, "judged: 1 sampled step"),
        (WHOLE, True, part.format("9 of 9 sampled steps")),
        (PART, False, part.format("3 of 9 sampled steps")),
    ):
        assert anomalies.judged(known, damaged) == said


def test_ends_name_their_attempt_where_there_were_several() -> None:
    hung = End(HUNG, (1,), "", 3, "forward", "no rank came on")
    one, two = (Ending(n, Case(()), hung) for n in (0, 1))
    well = Ending(2, Case(()), End(ENDED, message="every rank came to its end"))
    assert anomalies.told_ends([]) == anomalies.told_ends([well]) == []
    assert anomalies.told_ends([one]) == ["hung: no rank came on"]
    assert anomalies.told_ends([one, two, well]) == [
        "attempt 0: hung: no rank came on", "attempt 1: hung: no rank came on",
        "attempt 2: every rank came to its end",
    ]  # fmt: skip
    gone_on = replace(well, end=End(RUNNING, message="it is under way"))
    assert anomalies.told_ends([one, gone_on])[-1] == "attempt 2: it is under way"


def test_an_end_that_a_verdict_tells_is_not_told_twice() -> None:
    ends = [End(state, (1,), "SIGKILL", 3, "forward", "rank 1 died") for state in (HUNG, UNDECIDED)]
    one, two = (Ending(n, Case(()), end) for n, end in enumerate(ends))
    lost = replace(ANOMALY, detector="rank_lost", attempt=1, message="rank 1 died")
    assert anomalies.told_ends([one, two], [lost]) == [
        "attempt 0: hung: rank 1 died", "attempt 1: unknown, see below",
    ]  # fmt: skip
    assert anomalies.told_ends([one], [replace(lost, attempt=0)]) == ["hung, see below"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RunError("no such\x1b run"), RunError("").exit_code, "ddpprobe: no such? run\n"),
        (StoreDamaged("no manifest"), 3, "ddpprobe: {run}: no manifest\n"),
        (PermissionError(13, "no\x1b access"), 2, "ddpprobe: [Errno 13] no? access\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit("odd"), 0, ""),
        (SystemExit(5), 5, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, said: str, call: Call, run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert call("info", run) == (code, "", said.format(run=run))


def test_a_closed_pipe_exits_with_141_and_the_rest_of_the_output_goes_nowhere(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w") as out:

        def fail(_: object) -> int:
            out.write("still buffered")
            raise BrokenPipeError

        monkeypatch.setattr(info, "run", fail)
        monkeypatch.setattr(sys, "stdout", out)
        assert main.main(["info", str(run)]) == 141
    assert (tmp_path / "out").read_text() == ""


def test_without_words_the_command_line_is_the_process_s(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddpprobe", "verify", str(run)])
    assert main.main() == 0
    assert capsys.readouterr().out.startswith("all intact: ")


def test_a_shell_that_asks_gets_the_parser_of_the_verb_on_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Answered(Exception):
        pass

    options: list[str] = []

    def answer(parser: object) -> None:
        (verbs,) = (a for a in parser._actions if a.dest == "verb")
        options.extend(o for a in verbs.choices["trace"]._actions for o in a.option_strings)
        raise Answered

    monkeypatch.setattr(completion, "is_asked", lambda: True)
    monkeypatch.setattr(completion, "answer", answer)
    monkeypatch.setattr(completion, "verb_of", lambda: "trace")
    with pytest.raises(Answered):
        main.main(["--version"])
    assert "--site" in options


def test_what_is_wrong_with_the_words_is_said_with_all_of_them(call: Call, run: Path) -> None:
    assert call("info", run, "--no", "--such\x1b") == (
        2,
        "",
        (
            "usage: ddpprobe info [-h] [--json] [RUN]\n"
            "ddpprobe info: error: unrecognized arguments: --no --such?\n"
        ),
    )


@pytest.mark.parametrize(
    ("words", "usage", "answer"),
    [
        (
            "anomalies --levl page",
            "anomalies [-h] [--level",
            "arguments: --levl; did you mean --level?",
        ),
        ("anomalies --levl=page", "anomalies [-h] [--level", "did you mean --level?"),
        ("info -json", "info [-h]", "unrecognized arguments: -json; did you mean --json?"),
        ("trace --stepz 3 --polt", "trace [-h]", "did you mean --steps, --plot?"),
        ("run --evry 5 -- true", "run [options]", "--evry; did you mean --every?"),
        ("trce RUN", "[-h] [--version] VERB", "no verb 'trce'; did you mean trace?"),
        ("xyz", "[-h] [--version] VERB", "no verb 'xyz'; choose one of ls, info, anomalies, "),
    ],
)
def test_a_word_that_is_nearly_right_is_answered_with_the_one_that_is(
    call: Call, words: str, usage: str, answer: str
) -> None:
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"usage: ddpprobe {usage}")
    assert answer in err


def test_a_page_that_cannot_be_written_is_told_before_the_run_is_read(
    call: Call, run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "nope" / "x.html"
    wanted = f"{page}: there is no directory {page.parent}; make it first: mkdir -p {page.parent}"
    for words in (("report",), ("export", "--format", "csv")):
        code, out, err = call(*words, run, "-o", page)
        assert (code, out, err) == (2, "", f"ddpprobe: {wanted}\n")


@pytest.mark.parametrize("where", ["127.0.0.1:13377", "[::1]:13377", "gpu-7.lan:13377/metrics"])
def test_an_address_without_its_scheme_is_answered_with_the_url(call: Call, where: str) -> None:
    code, _, err = call("top", where)
    said = f"{where}: no such directory; a daemon's address is typed http://{where}\n"
    assert (code, err) == (2, f"ddpprobe: {said}")


def test_the_version_is_that_of_the_package(call: Call) -> None:
    assert call("--version") == (0, f"ddpprobe {importlib.metadata.version('ddpprobe')}\n", "")


def test_only_the_help_of_verbs_that_take_a_run_says_what_one_is(call: Call) -> None:
    for verb in VERBS:
        said = call(verb, "--help")[1]
        assert ("RUN is a run directory" in said) == (verb not in NO_RUN)
        assert ("URL of an\nobject store" in said) == (verb not in (*NO_RUN, "top", "trigger"))


def test_the_help_says_what_the_program_is_for_and_what_a_run_is(call: Call) -> None:
    _, out, _ = call("--help")
    assert out.startswith(
        "usage: ddpprobe [-h] [--version] VERB ...\n\n"
        "Names the first bad tensor of a distributed PyTorch run.\n"
    )
    assert "  --version   show the version and exit\n\nverbs:\n  VERB\n" in out
    assert "\nexit codes (3 goes before 1, and 1 before 4):\n  0  nothing wrong\n" in out
    assert out.endswith(f"\n\n{main.RUN[ANYWHERE]}\n")
    for verb in ("verify", "anomalies"):
        out = call(verb, "--help")[1]
        assert "  --json " in out
        assert "print one JSON object\n" in out
        assert out.endswith(f"\n\n{main.RUN[ANYWHERE]}\n")


def test_exit_codes_are_those_of_the_verb_and_name_a_verb_that_alone_has_one() -> None:
    assert exits("verify") == [(c, MEANINGS[c]) for c in (0, 2, 3, 4)]
    assert exits("daemon") == [(c, MEANINGS[c]) for c in (0, 2)]
    for own in ("run", "up"):
        assert "site, statistic" not in dict(exits(own))[2]
    assert exits("ls") == [(0, MEANINGS[0]), (2, VERBS["ls"].wrong_use)]
    everything = dict(exits())
    assert everything.pop(1) == f"{MEANINGS[1]} (only anomalies)"
    assert everything == {c: MEANINGS[c] for c in (0, 2, 3, 4)}
    assert dict(exits("anomalies"))[1] == MEANINGS[1]
    assert all(0 in verb.codes and 2 in verb.codes for verb in VERBS.values())


def test_gaps_are_lines_on_stderr_and_what_is_lost_goes_before_what_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert output.report_gaps([]) == 0
    assert output.report_gaps([], ["rank 1\x1b"]) == 4
    assert output.report_gaps(["a", "b"], ["c"]) == 3
    assert capsys.readouterr() == (
        "",
        (
            "ddpprobe: not known: rank 1?\nddpprobe: lost: a\nddpprobe: lost: b\n"
            "ddpprobe: not known: c\n"
        ),
    )


def test_text_on_its_way_to_a_terminal_may_be_cut_within_a_character() -> None:
    stream = io.StringIO()
    shown = output.Shown(stream)
    data = "größe\x1b[2J\nzwei\n".encode() + b"\xff."
    assert sum(shown.write(data[at : at + 3]) for at in range(0, len(data), 3)) == len(data)
    assert shown.writable()
    assert stream.getvalue() == "größe?[2J\nzwei\n\ufffd."


@pytest.mark.parametrize(
    ("tty", "environ", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    tty: bool, environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: tty)
    assert output.colours(stream) is coloured


def test_a_table_has_its_columns_two_spaces_apart() -> None:
    rows = [("site", "n"), ("a\x1b", 100), ("longer one", 7)]
    assert output.table(rows, right=[1]) == [
        "site          n",
        "a?          100",
        "longer one    7",
    ]
    assert output.table(rows) == ["site        n", "a?          100", "longer one  7"]


def test_rows_of_a_table_that_are_not_of_one_length_are_a_mistake() -> None:
    for rows in ([("site", "n"), ("a",)], [("site",), ("a", 1)]):
        with pytest.raises(ValueError, match="argument 2 is"):
            output.table(rows)
    assert output.table([]) == []


def test_a_verdict_is_a_row_of_columns() -> None:
    one = replace(ANOMALY, first_cause=False, level="warn", step=3, micro=1, rank=2)
    site = (one.place, one.phase, f"{one.detector}: {one.message}")
    assert anomalies.row(one) == ("WARN", "step 3 micro 1", "rank 2", *site)
    assert anomalies.row(one, "  ")[0] == "  WARN"
    nowhere = replace(one, rank=None, module=None, kind=None, attempt=4, first_cause=True)
    assert anomalies.row(nowhere) == (
        "WARN", "step 3 micro 1 attempt 4", "rank -", "-", one.phase, f"{site[-1]} (first cause)",
    )  # fmt: skip


def test_a_run_is_fetched_before_its_verb_reads_it_and_verify_tells_how_far_it_is(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []
    done: list[int] = []
    real = Bar.advance

    def advance(bar: Bar, n: int = 1) -> None:
        done.append(n)
        real(bar, n)

    monkeypatch.setattr(main, "fetch", lambda args: fetched.append(args.run))
    monkeypatch.setattr(Bar, "advance", advance)
    assert call("verify", run)[0] == 0
    assert fetched == [str(run)]
    assert sum(done) == 2  # a segment of each rank


def test_a_stream_without_an_encoding_gets_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

    stream = Plain()
    monkeypatch.setattr(sys, "stderr", stream)
    output.complain("größe")
    assert stream.text == "größe\n"


def test_a_verdict_names_its_attempt_where_the_run_has_several() -> None:
    found = [Episode(replace(ANOMALY, attempt=0, first_cause=True), ())]
    (once,), (resumed,) = (anomalies.lines(found, several=several) for several in (False, True))
    assert "attempt" not in once
    assert "attempt 0" in resumed


def test_of_many_ranks_of_which_the_same_is_said_one_line_is_printed() -> None:
    cause = replace(ANOMALY, detector="rank_lost", first_cause=True, message="rank 0 died")
    others = [
        replace(ANOMALY, level="info", first_cause=False, rank=r, message=f"rank {r} fell")
        for r in range(1, 40)
    ]
    few = anomalies.lines([Episode(cause, others[:3])], several=False)
    many = anomalies.lines([Episode(cause, others)], several=False)
    assert (len(few), len(many)) == (4, 2)
    assert "ranks 1-39" in many[1]
    assert many[1].endswith("rank 1 fell (38 more alike)")
