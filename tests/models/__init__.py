"""Models that people train: the same bits with the probe, true statistics, and faults named.

`families` holds the models, `training` a user's loop, `reference` what plain torch hooks see of it,
`probed` the same with the probe; `judge` compares the two.
"""
