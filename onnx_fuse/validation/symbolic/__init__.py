"""Shapes followed through a graph as polynomials over its symbols."""
