"""Does the verdict find what is wrong, and keep quiet when nothing is? Real jobs, planted faults.

`nets` and `training` are a user's script, `faults` and `healthy` what is done to it, `ranks`
carries a job out, `score` compares what is said with what was planted.
"""
