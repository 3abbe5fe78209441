"""Reading a run afterwards, or while it lives: the store and what the journals add to it."""
