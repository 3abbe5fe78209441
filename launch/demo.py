"""The main job from end to end: train 4 ranks, plant a NaN half-way, see it named.

    python launch/demo.py --wrap ddp

What is printed behind a `$` can be typed as it is; /metrics is read while the training runs. The
exit code is 0 if step, rank, module and phase are named rightly, live and afterwards.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

SCRIPT = os.path.relpath(Path(__file__).parent / "train_gpt.py")
STEPS = 120
FAULT = {"step": STEPS // 2, "rank": 2, "module": "blocks.2.mlp"}
EXPECTED = {**FAULT, "phase": "forward", "level": "page", "first_cause": True}
FAMILIES = r"^ddpprobe_(anomalies|rank_anomalies|nonfinite|grad_norm|loss)"
OPENMETRICS = "Accept: application/openmetrics-text"


def command(*words):
    """Show what to type; return what to run: the tool of this very environment."""
    print(f"\n$ {shlex.join(words)}", flush=True)
    return [str(Path(sys.executable).with_name(words[0])), *words[1:]]


def start_training(wrap, run):
    fault = "nan:" + ",".join(f"{key}={value}" for key, value in FAULT.items())
    job = ["torchrun", "--standalone", "--nproc-per-node=4", SCRIPT, f"--wrap={wrap}"]
    job += [f"--steps={STEPS}", f"--run-dir={run}", f"--inject={fault}"]
    return subprocess.Popen(command(*job), env={"OMP_NUM_THREADS": "1", **os.environ})


def watch(training, run):
    """Read /metrics until a page is up; return what was wrong with it: lines, [] if nothing."""
    while training.poll() is None:
        time.sleep(0.5)
        try:
            daemon = json.loads((run / "daemon" / "node_0000.json").read_text())
            url = f"http://{daemon['listen']}/metrics"
            header = dict([OPENMETRICS.split(": ")])
            request = urllib.request.Request(url, headers=header)
            with urllib.request.urlopen(request, timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, ValueError):
            continue  # the daemon is still starting
        pages = [x for x in lines if re.match(r'ddpprobe_anomalies_total\{.*"page".*\} [1-9]', x)]
        if pages:
            print(f"\n$ curl -sH '{OPENMETRICS}' {url} | grep -E '{FAMILIES}' | grep -v ' 0.0$'")
            shown = [x for x in lines if re.match(FAMILIES, x) and not x.endswith(" 0.0")]
            print("\n".join(shown), end="\n\n", flush=True)
            want = [f'{key}="{FAULT[key]}"' for key in ("step", "rank")]
            want.append(f'fqn="{FAULT["module"]}"')
            named = any(all(label in page for label in want) for page in pages)
            return [] if named else [f"/metrics does not name {FAULT}: {pages}"]
    return ["training ended before /metrics showed a page"]


def judge(run):
    """Compare the first verdict in the store with the fault; return what is wrong with it."""
    words = [str(Path(sys.executable).with_name("ddpprobe")), "anomalies", str(run), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["anomalies"] if done.stdout else []
    if done.returncode != 1 or not found:
        return [f"ddpprobe anomalies --json ended with {done.returncode}: {done.stderr}"]
    first = found[0]
    return [f"{k} is {first[k]!r}, not {v!r}" for k, v in EXPECTED.items() if first[k] != v]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wrap", choices=("ddp", "fsdp2"), default="ddp")
    wrap = parser.parse_args().wrap
    run = Path("ddpprobe-runs", f"demo-{wrap}-{time.strftime('%Y%m%d-%H%M%S')}")
    began = time.monotonic()
    training = start_training(wrap, run)
    try:
        wrong = watch(training, run)
    finally:
        if training.poll() is None and sys.exc_info()[0]:
            training.terminate()
        code = training.wait()
    wrong += [f"torchrun ended with {code}"] if code else []
    page = str(run / "report.html")
    for verb in (["anomalies"], ["info"], ["report", "-o", page]):
        subprocess.run(command("ddpprobe", verb[0], str(run), *verb[1:]), check=False)
    wrong += judge(run)
    wrong += [] if Path(page).is_file() else ["no report was written"]
    print(f"\nplanted: {FAULT}, found: {'; '.join(wrong) or 'exactly that, live and afterwards'}")
    print(f"report: {Path(page).resolve().as_uri()}")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
