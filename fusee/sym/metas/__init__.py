"""Meta results of common operators: faster than torch's, and with the strides of CPU kernels.

torch's meta kernels in Python take a millisecond, and those that ask for the device take a meta
tensor for a CUDA one. Each function here gives what the CPU kernel gives; whatever it isn't sure
of (symbolic sizes, unusual strides) it leaves to torch.
"""

from fusee.sym.metas import contractions as contractions
from fusee.sym.metas import fourier as fourier
from fusee.sym.metas import gradients as gradients
from fusee.sym.metas import normalisation as normalisation
from fusee.sym.metas import pointwise as pointwise
from fusee.sym.metas import recurrent as recurrent
from fusee.sym.metas import reductions as reductions
from fusee.sym.metas.table import METAS

__all__ = ["METAS"]
