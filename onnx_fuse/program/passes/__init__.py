"""Passes over a Program's calls."""
