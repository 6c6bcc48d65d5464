"""Compiling starts no process and needs no compiler: it works with an empty PATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

STARTS = set(
    "subprocess.Popen os.exec os.fork os.forkpty "
    "os.posix_spawn os.spawn os.system pty.spawn".split()
)
started = []
sys.addaudithook(lambda event, args: started.append((event, args)) if event in STARTS else None)

import torch
from fusee.backends import lookup

def program(x, w):
    return torch.layer_norm(torch.nn.functional.gelu(x @ w).softmax(-1), (16,)), x.sum(0)

x, w = torch.randn(8, 32), torch.randn(32, 16)
with torch.no_grad():
    if sys.argv[1] == "stock":
        got = torch.compile(program, backend="fusee")(x, w)
    else:
        from tests.capture import capture
        gm, rebuild = capture(program, (x, w))
        got = rebuild(lookup("fusee")(gm, [x, w])(x, w))
    torch.testing.assert_close(got, program(x, w))
assert not started, started
loaded = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
assert sys.argv[1] == "stock" or not loaded, loaded
print("done")
"""


@pytest.mark.parametrize("way", ["stock", "direct"])
def test_no_process_and_no_compiler(way: str, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    environment = {
        "PATH": str(tmp_path / "empty"),
        "HOME": str(tmp_path),
        "PYTHONPATH": str(root),
        "FUSEE_CACHE_DIR": str(tmp_path / "cache"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, way],
        env=environment,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.stdout == "done\n", ended.stderr
