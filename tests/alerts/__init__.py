"""Faults in real jobs, until a webhook has heard of them: `python -m tests.alerts`."""
