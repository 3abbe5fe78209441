#!/usr/bin/env bash
# After the ranks, on one node: brings into the store what a daemon that was killed has left in its
# journals, then prints the verdict. The exit code is that of `ddpprobe anomalies`.
#
#     epilog.sh RUN NODES
#
# By hand it does the same for a job that Slurm has killed (time, memory, a lost node), on any
# machine that sees the directory.
set -euo pipefail

if [ "$#" -ne 2 ]; then
  echo "epilog.sh: expected the run directory and the number of nodes, got $# arguments" >&2
  echo "type: epilog.sh /shared/runs/gpt-4711 2" >&2
  exit 2
fi
run=$1 nodes=$2

if [ ! -d "$run" ]; then
  echo "epilog.sh: $run is not there: the job ended before ddpprobe.install()" >&2
  exit 2
fi
for ((index = 0; index < nodes; index++)); do
  # Nothing is announced to Prometheus and nothing is served beyond this machine: the job is over.
  DDPPROBE_SD_DIR='' DDPPROBE_LISTEN=127.0.0.1:0 DDPPROBE_LINGER=0 \
    ddpprobe daemon --dir "$run" --node "$(printf 'node_%04d' "$index")" --after ||
    echo "epilog.sh: node $index is not all in the store; its journals are read instead" >&2
done
ddpprobe anomalies "$run"
