"""Tensors without data, and the sizes and strides that operators give them."""
