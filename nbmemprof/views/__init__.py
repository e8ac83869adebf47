"""Views: each shows a frame or a capture."""
