"""Charts: frame in, altair.Chart out."""
