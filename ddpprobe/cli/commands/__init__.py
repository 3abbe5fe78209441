"""The verbs of the command line, one file each.

A verb's module docstring is its help text; it has `add_arguments(parser)` and `run(args) -> int`,
the exit code. A module is imported only when its verb is used (`ddpprobe/cli/verbs.py` has the line
of each for the help), so it imports at its top what it needs.
"""
