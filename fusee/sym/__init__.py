"""Integers known or unknown at compile time: shapes, strides and indices all use them."""
