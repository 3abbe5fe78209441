"""The command line `ddpprobe`."""
