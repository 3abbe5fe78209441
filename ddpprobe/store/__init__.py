"""The store of a run: the only room that knows Zarr."""
