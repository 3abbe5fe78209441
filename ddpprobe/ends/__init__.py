"""How an attempt ended and what it died of: evidence, and one judgement of it for everybody."""
