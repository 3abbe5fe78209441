"""The verbs of the command line, one file each.

A verb's module docstring is its help text; it has `add_arguments(parser)` and `run(args) -> int`,
the exit code. What is slow to import is imported when a verb runs, so that help is instant.
"""
