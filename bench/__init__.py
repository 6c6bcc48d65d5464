"""The benchmarks behind docs/benchmarks.md: eager, TorchInductor and Fusee on one machine."""
