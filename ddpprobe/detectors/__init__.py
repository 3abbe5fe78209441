"""Detectors: pure folds over the merged stream of `StepRecord`s, one file each, NumPy only.

A detector is a class below `detector.Detector`, one line in `suite.DETECTORS`, and nothing else:
its name, title, settings and documentation are the class's. The same stream always gives the same
anomalies, so what was seen live and what a replay of the store finds are one and the same. State is
bounded, and no value of a record can make a detector raise.
"""
