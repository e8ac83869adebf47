"""Charts: frame in, altair.Chart out. Altair is imported when one is drawn."""
