"""What outlives a process: captures, for the next one that finds everything as it was."""

from __future__ import annotations
