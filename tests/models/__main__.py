"""`python -m tests.models [--seed N] [--jobs N] [WORDS...]`: train models of others with the probe.

Those whose title holds all words; without words all of them are trained, and
docs/reference/models.md is written anew.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.models import processes
from tests.models.judge import Outcome, prove
from tests.models.listed import ARCHITECTURES


def main(words: Sequence[str]) -> int:
    """Prove the chosen models; 1 if anything is wrong, 2 if there is no such model."""
    parser = argparse.ArgumentParser(prog="python -m tests.models")
    parser.add_argument("words", nargs="*", help="of the title of a model; without one: all")
    parser.add_argument("--seed", type=int, default=0, help="draws the modules of the faults")
    parser.add_argument("--jobs", type=int, default=2, help="how many models at once")
    given = parser.parse_args(words)
    chosen = [
        one for title, one in ARCHITECTURES.items()
        if all(word.lower() in title.lower() for word in given.words)
    ]  # fmt: skip
    if not chosen:
        print(f"no model is called {' '.join(given.words)!r}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(given.jobs) as pool:  # the work is done in other processes
        proofs = [pool.submit(prove, one, given.seed) for one in chosen]
        for proof in as_completed(proofs):
            _say(proof.result())
    outcomes = [proof.result() for proof in proofs]
    if not given.words:
        from tests.models.table import write

        write(outcomes)
    failed = [outcome for outcome in outcomes if outcome.problems]
    print(f"{len(outcomes) - len(failed)} models are right, {len(failed)} are not")
    return int(bool(failed))


def _say(outcome: Outcome) -> None:
    mark = "FAILED" if outcome.problems else "right"
    named = ", ".join(outcome.named) or "no fault"
    print(
        f"{mark:6} {outcome.title:46} {outcome.sites:5} sites {outcome.rows:6} rows "
        f"{outcome.worst:.0e}  named: {named}  {outcome.seconds:.1f} s", flush=True,
    )  # fmt: skip
    for problem in outcome.problems[:6]:
        print("       " + problem[-1500:].replace("\n", "\n       "), flush=True)
    if len(outcome.problems) > 6:
        print(f"       ... {len(outcome.problems)} in all", flush=True)


if __name__ == "__main__":
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}
    processes.import_first(["tests.models.imported"])
    sys.exit(main(sys.argv[1:]))
