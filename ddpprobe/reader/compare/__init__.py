"""Two runs beside each other: where they part first."""
