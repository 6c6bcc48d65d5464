"""Every instruction of each Python that we support has its meaning, or is refused by name."""

from __future__ import annotations

import argparse
import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusee.capture.bytecode import program
from fusee.capture.frame import OPCODES
from fusee.capture.opcodes import REFUSED

# As dis.opmap lists them, without what only CPython's own loop sees and what no code object holds.
V312 = (
    "BEFORE_ASYNC_WITH BEFORE_WITH BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP "
    "BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE CALL "
    "CALL_FUNCTION_EX CALL_INTRINSIC_1 CALL_INTRINSIC_2 CHECK_EG_MATCH CHECK_EXC_MATCH "
    "CLEANUP_THROW COMPARE_OP CONTAINS_OP COPY COPY_FREE_VARS DELETE_ATTR DELETE_DEREF "
    "DELETE_FAST DELETE_GLOBAL DELETE_NAME DELETE_SUBSCR DICT_MERGE DICT_UPDATE END_ASYNC_FOR "
    "END_FOR END_SEND FORMAT_VALUE FOR_ITER GET_AITER GET_ANEXT GET_AWAITABLE GET_ITER "
    "GET_LEN GET_YIELD_FROM_ITER IMPORT_FROM IMPORT_NAME INTERPRETER_EXIT IS_OP JUMP_BACKWARD "
    "JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD KW_NAMES LIST_APPEND LIST_EXTEND "
    "LOAD_ASSERTION_ERROR LOAD_ATTR LOAD_BUILD_CLASS LOAD_CLOSURE LOAD_CONST LOAD_DEREF "
    "LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK LOAD_FROM_DICT_OR_DEREF "
    "LOAD_FROM_DICT_OR_GLOBALS LOAD_GLOBAL LOAD_LOCALS LOAD_NAME LOAD_SUPER_ATTR MAKE_CELL "
    "MAKE_FUNCTION MAP_ADD MATCH_CLASS MATCH_KEYS MATCH_MAPPING MATCH_SEQUENCE NOP POP_EXCEPT "
    "POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP "
    "PUSH_EXC_INFO PUSH_NULL RAISE_VARARGS RERAISE RESERVED RESUME RETURN_CONST "
    "RETURN_GENERATOR RETURN_VALUE SEND SETUP_ANNOTATIONS SET_ADD SET_UPDATE STORE_ATTR "
    "STORE_DEREF STORE_FAST STORE_GLOBAL STORE_NAME STORE_SLICE STORE_SUBSCR SWAP "
    "UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNPACK_EX UNPACK_SEQUENCE WITH_EXCEPT_START "
    "YIELD_VALUE "
)
V313 = (
    "BEFORE_ASYNC_WITH BEFORE_WITH BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP "
    "BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE CALL "
    "CALL_FUNCTION_EX CALL_INTRINSIC_1 CALL_INTRINSIC_2 CALL_KW CHECK_EG_MATCH "
    "CHECK_EXC_MATCH CLEANUP_THROW COMPARE_OP CONTAINS_OP CONVERT_VALUE COPY COPY_FREE_VARS "
    "DELETE_ATTR DELETE_DEREF DELETE_FAST DELETE_GLOBAL DELETE_NAME DELETE_SUBSCR DICT_MERGE "
    "DICT_UPDATE END_ASYNC_FOR END_FOR END_SEND ENTER_EXECUTOR EXIT_INIT_CHECK FORMAT_SIMPLE "
    "FORMAT_WITH_SPEC FOR_ITER GET_AITER GET_ANEXT GET_AWAITABLE GET_ITER GET_LEN "
    "GET_YIELD_FROM_ITER IMPORT_FROM IMPORT_NAME INTERPRETER_EXIT IS_OP JUMP_BACKWARD "
    "JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD LIST_APPEND LIST_EXTEND LOAD_ASSERTION_ERROR "
    "LOAD_ATTR LOAD_BUILD_CLASS LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR "
    "LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS "
    "LOAD_GLOBAL LOAD_LOCALS LOAD_NAME LOAD_SUPER_ATTR MAKE_CELL MAKE_FUNCTION MAP_ADD "
    "MATCH_CLASS MATCH_KEYS MATCH_MAPPING MATCH_SEQUENCE NOP POP_EXCEPT POP_JUMP_IF_FALSE "
    "POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PUSH_EXC_INFO PUSH_NULL "
    "RAISE_VARARGS RERAISE RESERVED RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE SEND "
    "SETUP_ANNOTATIONS SET_ADD SET_FUNCTION_ATTRIBUTE SET_UPDATE STORE_ATTR STORE_DEREF "
    "STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_GLOBAL STORE_NAME "
    "STORE_SLICE STORE_SUBSCR SWAP TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNPACK_EX "
    "UNPACK_SEQUENCE WITH_EXCEPT_START YIELD_VALUE "
)
_NEVER_IN_CODE = {
    "CACHE", "EXTENDED_ARG", "JUMP", "JUMP_NO_INTERRUPT", "LOAD_SUPER_METHOD", "POP_BLOCK",
    "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD", "SETUP_CLEANUP", "SETUP_FINALLY",
    "SETUP_WITH",
}  # fmt: skip


@pytest.mark.parametrize("names", [V312, V313], ids=["3.12", "3.13"])
def test_every_instruction_is_known(names: str) -> None:
    assert not set(names.split()) - _NEVER_IN_CODE - set(OPCODES)


def test_every_instruction_of_this_python_is_known() -> None:
    # those above 255 are of the compiler, and in no code
    names = {x for x, code in dis.opmap.items() if code < 256 and "INSTRUMENTED" not in x}
    assert not names - _NEVER_IN_CODE - set(OPCODES)


def test_what_is_refused_exists() -> None:
    before_312 = {"ASYNC_GEN_WRAP", "IMPORT_STAR", "PREP_RERAISE_STAR", "PRINT_EXPR"}
    assert set(REFUSED) <= {*dis.opmap, *V312.split(), *V313.split(), *before_312}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


@pytest.mark.parametrize("module", [argparse, dis, inspect, torch.nn.functional])
def test_decoding_says_what_dis_says(module: Any) -> None:
    has_table = {*dis.hasconst, *dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hascompare}
    for code in _codes(compile(inspect.getsource(module), "module.py", "exec")):
        decoded: Any = dis.Bytecode(code)
        said = [i for i in decoded if i.opname not in ("CACHE", "EXTENDED_ARG")]
        found = program(code)
        assert [(i.name, i.arg) for i in found.instructions] == [
            (i.opname, i.arg or 0) for i in said
        ]
        at = [i.offset for i in said] + [len(code.co_code)]

        def after(offset: int, at: list[int] = at) -> int:
            return next(k for k, place in enumerate(at) if place >= offset)

        line = code.co_firstlineno
        for ours, theirs in zip(found.instructions, said):
            line = theirs.positions.lineno or line
            assert ours.line == line
            is_jump = theirs.opcode in (*dis.hasjrel, *dis.hasjabs)
            assert ours.target == (after(theirs.argval) if is_jump else -1)
            if theirs.opcode in has_table and theirs.opname != "KW_NAMES":
                assert (type(ours.value), ours.value) == (type(theirs.argval), theirs.argval)
        entries = [
            (after(e.start), after(e.end), after(e.target), *e[3:])
            for e in decoded.exception_entries
        ]
        assert list(map(tuple, found.handlers)) == entries
