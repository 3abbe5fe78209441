"""What ddpprobe costs, beside its peers: each module prints a section of docs/benchmarks.md."""
