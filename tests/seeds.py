"""torch.manual_seed without what torch keeps of each call: the text of the whole stack."""

from __future__ import annotations

import types

import torch


def forget_stacks() -> None:
    """Seeds wait for devices that are not there; in a test the stack's text takes 2 to 8 ms."""
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if "traceback" in vars(devices):
            vars(devices)["traceback"] = types.SimpleNamespace(format_stack=list)
