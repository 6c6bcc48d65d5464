"""Kernels written by hand, by the ABI that fusee/runtime/launch.py states."""

from __future__ import annotations

DO_NOTHING = """
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) {
  ret void
}
"""

# out[i] = a[i] + params[0] * b[i] over int64
SCALED_ADD = """
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) nounwind {
entry:
  %a = load ptr, ptr %bufs
  %b.at = getelementptr ptr, ptr %bufs, i64 1
  %b = load ptr, ptr %b.at
  %out.at = getelementptr ptr, ptr %bufs, i64 2
  %out = load ptr, ptr %out.at
  %scale = load i64, ptr %params
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %body, label %done
body:
  %a.i = getelementptr i64, ptr %a, i64 %i
  %x = load i64, ptr %a.i
  %b.i = getelementptr i64, ptr %b, i64 %i
  %y = load i64, ptr %b.i
  %scaled = mul i64 %y, %scale
  %sum = add i64 %x, %scaled
  %out.i = getelementptr i64, ptr %out, i64 %i
  store i64 %sum, ptr %out.i
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
"""

# calls[i] = 1 + thread, once per iteration: who did what
WHO = """
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) nounwind {
entry:
  %out = load ptr, ptr %bufs
  %me = add i64 %thread, 1
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %body, label %done
body:
  %at = getelementptr i64, ptr %out, i64 %i
  %old = load i64, ptr %at
  %new = add i64 %old, %me
  store i64 %new, ptr %at
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
"""

# reports code params[0] with the value params[1]
REPORT = """
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) nounwind {
  %status.at = getelementptr ptr, ptr %bufs, i64 1
  %status = load ptr, ptr %status.at
  %code = load i64, ptr %params
  %value.at = getelementptr i64, ptr %params, i64 1
  %value = load i64, ptr %value.at
  %place = getelementptr i64, ptr %status, i64 1
  store i64 %value, ptr %place
  store i64 %code, ptr %status
  ret void
}
"""

# y[0] = exp(x[0]) through SLEEF, four lanes wide or eight
EXP8 = """
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) nounwind {
  %x = load ptr, ptr %bufs
  %y.at = getelementptr ptr, ptr %bufs, i64 1
  %y = load ptr, ptr %y.at
  %in = load <8 x float>, ptr %x, align 4
  %out = call <8 x float> @Sleef_expf8_u10(<8 x float> %in)
  store <8 x float> %out, ptr %y, align 4
  ret void
}
declare <8 x float> @Sleef_expf8_u10(<8 x float>)
"""

# y[0] = 3 * x[0] through a function and a constant in memory
TRIPLED = """
@three = internal constant float 3.0
define internal float @triple(float %x) nounwind {
  %k = load float, ptr @three
  %y = fmul float %x, %k
  ret float %y
}
define void @kernel(ptr %bufs, ptr %params, i64 %begin, i64 %end, i64 %thread) nounwind {
  %x = load ptr, ptr %bufs
  %y.at = getelementptr ptr, ptr %bufs, i64 1
  %y = load ptr, ptr %y.at
  %in = load float, ptr %x
  %out = call float @triple(float %in)
  store float %out, ptr %y
  ret void
}
"""


def numbered(text: str, number: int) -> str:
    """The same kernel as another unit."""
    return f"; {number}\n{text}"
