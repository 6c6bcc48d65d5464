"""From kernels to code that runs: one folder a target, and the host function around them."""
