"""Where a run is outside of what other runs of the same job did."""
