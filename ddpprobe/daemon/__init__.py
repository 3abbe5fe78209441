"""The process beside the training: tails, gathers, judges, stores, serves, notices deaths."""
