"""What outlives a process: captures, for the next one that finds everything as it was."""
