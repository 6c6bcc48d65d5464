"""The graph of torch calls, traced to a functional graph of ATen operators. Start at trace.py."""
