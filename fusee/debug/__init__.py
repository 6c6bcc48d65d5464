"""Seeing what was compiled: explain, export."""
