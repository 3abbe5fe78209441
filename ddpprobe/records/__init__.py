"""What every room shares: sites, statistics and steps, how they merge, and who holds which part."""
