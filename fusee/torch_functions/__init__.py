"""What capture does with functions of torch whose bytecode does not say it: stand-ins, by kind.

Capture itself knows Python and what a tensor is. Each module here registers stand-ins
(`capture/builtins.py`); whoever compiles imports this package.
"""

from fusee.torch_functions import (  # noqa: F401
    arrays,
    composites,
    higher_order,
    training,
    triton_kernels,
)
