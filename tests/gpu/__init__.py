"""`make test-gpu`: what only a GPU can show, in parts that run alone in a few minutes each."""
