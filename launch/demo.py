"""The main job from end to end: train 4 ranks, plant a NaN half-way, see it named.

    python launch/demo.py --wrap ddp

What is printed after a `$` can be typed as it is; /metrics is read while the training runs. The
exit code is 0 if step, rank, module and phase are named rightly, live and afterwards. With a GPU
for each of `--nproc` ranks it trains on these, over NCCL; there, give it more `--steps` than the
daemon takes to start.
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
OTHERWISE = {  # of a source tree that is not installed
    "torchrun": ["-m", "torch.distributed.run"],
    "ddpprobe": ["-c", "import sys; from ddpprobe.cli.main import main; sys.exit(main())"],
}
FAMILIES = r"^ddpprobe_(anomalies|rank_anomalies|nonfinite|grad_norm|loss)"
OPENMETRICS = "Accept: application/openmetrics-text"


def command(*words):
    """Show what to type; return what to run: the tool of this very environment."""
    print(f"\n$ {shlex.join(words)}", flush=True)
    return [*tool(words[0]), *words[1:]]


def tool(name):
    """Return the command of this environment, or what it would run."""
    script = Path(sys.executable).with_name(name)
    return [str(script)] if script.exists() else [sys.executable, *OTHERWISE[name]]


def start_training(args, fault, run):
    planted = "nan:" + ",".join(f"{key}={value}" for key, value in fault.items())
    job = ["torchrun", "--standalone", f"--nproc-per-node={args.nproc}", SCRIPT]
    job += [f"--wrap={args.wrap}", f"--steps={args.steps}", f"--run-dir={run}"]
    job += [f"--inject={planted}"]
    return subprocess.Popen(command(*job), env={"OMP_NUM_THREADS": "1", **os.environ})


def watch(training, fault, run):
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
            want = [f'{key}="{fault[key]}"' for key in ("step", "rank")]
            want.append(f'fqn="{fault["module"]}"')
            named = any(all(label in page for label in want) for page in pages)
            return [] if named else [f"/metrics does not name {fault}: {pages}"]
    return ["training ended before /metrics showed a page"]


def judge(run, fault):
    """Compare the first verdict in the store with the fault; return what is wrong with it."""
    words = [*tool("ddpprobe"), "anomalies", str(run), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["anomalies"] if done.stdout else []
    if done.returncode != 1 or not found:
        return [f"ddpprobe anomalies --json ended with {done.returncode}: {done.stderr}"]
    first, expected = found[0], {**fault, "phase": "forward", "level": "page", "first_cause": True}
    return [f"{k} is {first[k]!r}, not {v!r}" for k, v in expected.items() if first[k] != v]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wrap", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--nproc", type=int, default=4, help="ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="default: %(default)s")
    args = parser.parse_args()
    # Half-way, at a step that is sampled, so that the module is known; not on the first rank.
    step = args.steps // 20 * 10
    fault = {"step": step, "rank": min(2, args.nproc - 1), "module": "blocks.2.mlp"}
    run = Path("ddpprobe-runs", f"demo-{args.wrap}-{time.strftime('%Y%m%d-%H%M%S')}")
    began = time.monotonic()
    training = start_training(args, fault, run)
    try:
        wrong = watch(training, fault, run)
    finally:
        if training.poll() is None and sys.exc_info()[0]:
            training.terminate()
        code = training.wait()
    wrong += [f"torchrun ended with {code}"] if code else []
    page = str(run / "report.html")
    for verb in (["anomalies"], ["info"], ["report", "-o", page]):
        subprocess.run(command("ddpprobe", verb[0], str(run), *verb[1:]), check=False)
    wrong += judge(run, fault)
    wrong += [] if Path(page).is_file() else ["no report was written"]
    print(f"\nplanted: {fault}, found: {'; '.join(wrong) or 'exactly that, live and afterwards'}")
    print(f"report: {Path(page).resolve().as_uri()}")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
