"""The benchmark behind every figure in the README: eager, TorchInductor, Fusee on one machine."""
