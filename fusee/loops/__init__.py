"""The loop IR: what is computed over which indices. Nothing here knows a target machine."""
