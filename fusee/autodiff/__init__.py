"""Ahead-of-time autograd: forward and backward of a graph, traced before the first run."""
