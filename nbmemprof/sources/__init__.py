"""Sources: each fills the tables of a capture."""
