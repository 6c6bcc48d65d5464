import fusee.torch_functions  # noqa: F401  # as whoever compiles does
