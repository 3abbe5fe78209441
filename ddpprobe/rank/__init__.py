"""The training side: what one rank observes, and how it reaches the run directory."""
