"""Loops as LLVM IR for machines of many threads."""
