"""Verbs of %memprof: one file a verb, found by the parser."""
