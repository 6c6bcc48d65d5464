"""Tensors without data, and the sizes and strides that operators give them.

torch's meta kernels in Python take a millisecond, and those that ask for the device take a meta
tensor for a CUDA one. Each rule gives what the CPU kernel gives; whatever it isn't sure of
(symbolic sizes, unusual strides) it leaves to torch.
"""

from fusee.fake import products as products
from fusee.fake import rules as rules
from fusee.fake.rules import METAS as METAS
