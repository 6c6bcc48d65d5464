"""Kernels as LLVM IR with explicit vectors, and machine code from it."""
