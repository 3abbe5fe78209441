"""One module of a run, executed again from what was captured of it."""
