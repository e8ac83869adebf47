"""Analyses: pure functions from a capture to a frame, each answering one question."""
