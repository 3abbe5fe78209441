"""A run while it goes on, as `ddpprobe top` shows it."""
