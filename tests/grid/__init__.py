"""The grid: every statistic of every site, under every wrapper, against one unsharded process."""
