"""Is everything there that was written down, and is it what was written?"""
