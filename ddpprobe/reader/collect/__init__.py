"""The directories of several nodes of a run, merged into one: what one shared directory would hold.

`job.collect` does it. A group of the store has one writer, so it is carried as it is; what a node
captured is put together anew with the others' parts; the root is made of all.
"""
