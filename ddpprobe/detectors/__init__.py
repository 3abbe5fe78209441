"""Detectors: pure folds over the merged stream of `StepRecord`s, one file each, NumPy only.

A detector has a `name` and two methods: `update(record) -> list[Anomaly]`, called once a record in
ascending order of steps, and `finish() -> list[Anomaly]`. The same stream always gives the same
anomalies, so what was seen live and what a replay of the store finds are one and the same. State is
bounded, and no value of a record can make a detector raise.
"""
