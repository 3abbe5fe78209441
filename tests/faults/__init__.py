"""Kills, mutations and hostile stores, as many as one has time for: `python -m tests.faults`."""
