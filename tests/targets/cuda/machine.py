"""Runs a kernel's LLVM IR on numpy, all threads of all blocks: stands for a GPU in the tests.

It finds what a GPU would not tell:

    out of bounds      every access is checked against the buffer that its pointer comes from
    misalignment       so is the `align` of each access
    races              a thread that meets what another stored, with no barrier between, or from
                       another block with no fence, counter and fence; in global memory, two
                       threads that store to one place
    divergence         a barrier, or a shuffle, that not all threads of the block or warp reach

Threads run in lockstep; of those that stand at different blocks of code the first go first. It
reads what our emitter writes: one function, opaque pointers, vectors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
NUMPY = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "float": np.float32, "double": np.float64, "half": np.float16, "bfloat": np.float32,
    "ptr": np.int64,
}  # fmt: skip
BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4}
BYTES |= {"i64": 8, "double": 8, "ptr": 8}
WARP = 32
VECTOR = re.compile(r"<(\d+) x (\w+)>")
HIGH = 40  # a pointer is the number of a buffer, and this many bits of an offset in it
# names of numpy's functions for LLVM's
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "fadd": np.add, "fsub": np.subtract,
    "fmul": np.multiply, "fdiv": np.divide, "shl": np.left_shift, "ashr": np.right_shift,
}  # fmt: skip
COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def _fma_down(x: Array, y: Array, z: Array) -> Array:
    """Rounded to the smaller neighbour."""
    exact = x.astype(np.float64) * y + z
    found = exact.astype(np.float32)
    return np.where(found > exact, np.nextafter(found, np.float32(-np.inf)), found)


# NVIDIA's own instructions of float32
NVVM: dict[str, Callable[..., Array]] = {
    "saturate.f": lambda x: np.where(np.isnan(x), np.float32(0), np.clip(x, 0, 1)),
    "fma.rm.f": _fma_down,
    "ex2.approx.ftz.f32": np.exp2,
    "rcp.approx.ftz.f": lambda x: 1 / x,
    "div.full": np.divide,
    "rsqrt.approx.f": lambda x: 1 / np.sqrt(x),
}


class Fault(Exception):
    """What a kernel does that it must not."""


def to_bfloat16(x: Array) -> Array:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def unsigned(x: Array) -> Array:
    return x.view(x.dtype.str.replace("i", "u")) if x.dtype.kind == "i" else x


def split_arguments(text: str) -> list[str]:
    """At commas outside of brackets."""
    found, depth, start = [], 0, 0
    for k, letter in enumerate(text):
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and not depth:
            found.append(text[start:k].strip())
            start = k + 1
    rest = text[start:].strip()
    return [*found, rest] if rest else found


def typed(text: str) -> tuple[str, str]:
    """(type, value) of an operand."""
    found = re.match(r"(<\d+ x \w+>|ptr addrspace\(3\)|\w+)((?: \w+)*?) ([^ ].*|%\S+)$", text)
    assert found, text
    return found.group(1), found.group(3)


class Machine:
    def __init__(self, module: str, blocks: int, threads: int) -> None:
        self.blocks, self.threads, self.n = blocks, threads, blocks * threads
        self.tid = np.tile(np.arange(threads, dtype=np.int32), blocks)
        self.block = np.repeat(np.arange(blocks, dtype=np.int32), threads)
        head = r"define ptx_kernel void @\w+\(([^\n]*)\)[^\n()]*"
        found = re.search(rf"{head}\{{\n(.*?)\n\}}", module, re.S)
        assert found, module
        self.takes_rows = "byval" in found.group(1)
        self.arguments = [x.split()[0 :: len(x.split()) - 1] for x in found.group(1).split(",")]
        self.labels: dict[str, int] = {}
        self.code: list[list[str]] = []
        for line in found.group(2).splitlines():
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
                self.code.append([])
            else:
                self.code[-1].append(line.strip())
        shared = re.search(r"@shared = .* \[(\d+) x i8\]", module)
        self.shared = -(-int(shared.group(1)) // 16) * 16 if shared else 0  # aligned for each block
        self.buffers: list[Array] = []
        self.owners: list[Array | None] = []
        self.free: set[int] = set()
        self.counts: set[int] = set()  # memory that begins with counters
        self.env: dict[str, Array] = {}
        self.epoch = np.zeros(blocks, np.int64)
        self.warp_epoch = np.zeros(self.n, np.int64)
        # per thread its fences, and those before the last barrier; what blocks know of all threads:
        # what they have met in counters, and what of that they may rely on after a fence
        self.fences, self.settled = (np.zeros(self.n, np.int64) for _ in "ab")
        self.counters: dict[int, Array] = {}
        self.met: dict[int, Array] = {}
        self.known: dict[int, Array] = {}
        self.tags: dict[int, Array] = {}  # of each byte stored: epochs of block and warp, fences

    # ------------------------------------------------------------------------------ running

    def run(self, given: Sequence[Array | int]) -> None:
        """Arrays for pointers are looked at as bytes and changed in place."""
        for (kind, name), x in zip(self.arguments, given, strict=True):
            if kind == "ptr":
                self.env[name] = np.full(self.n, self.buffer(np.asarray(x), name=name))
            else:
                self.env[name] = np.full(self.n, x, NUMPY[kind])
        if self.shared:
            start = self.buffer(np.zeros(self.shared * self.blocks, np.uint8))
            self.shared_at = len(self.buffers) - 1
            self.env["@shared"] = start + self.block.astype(np.int64) * self.shared
            self.reader, self.read_at = (np.full(self.shared * self.blocks, -1) for _ in "ab")
            self.writer, self.written_at = (np.full(self.shared * self.blocks, -1) for _ in "ab")
        at, end = np.zeros(self.n, np.int64), len(self.code)
        before = np.full(self.n, -1)
        with np.errstate(all="ignore"):
            for _ in range(200_000):
                here = int(at.min())
                if here == end:
                    return
                mask = at == here
                target = self._block(self.code[here], mask, before)
                before[mask] = here
                at[mask] = target[mask]
        raise Fault("it does not end")

    def buffer(self, x: Array, watched: bool = True, name: str = "") -> int:
        """The address of memory. Not `watched`: any thread may store anywhere."""
        if not watched:
            self.free.add(len(self.buffers))
        if name == "%shared":
            self.counts.add(len(self.buffers))
        self.buffers.append(x.reshape(-1).view(np.uint8))
        self.owners.append(None)
        return len(self.buffers) << HIGH

    def _block(self, lines: list[str], mask: Array, before: Array) -> Array:
        phis: dict[str, Array] = {}
        for line in lines:
            name, _, text = line.rpartition(" = ") if re.match(r"%\S+ = ", line) else ("", "", line)
            word = text.split(" ", 1)[0]
            if word == "phi":
                phis[name] = self._phi(name, text, mask, before)
                continue
            for phi, x in phis.items():
                self._set(phi, x, mask)
            phis = {}
            if word == "ret":
                return np.full(self.n, len(self.code))
            if word == "br":
                return self._branch(text)
            x = getattr(self, f"_{word}", self._arithmetic)(text, mask)
            if name:
                self._set(name, x, mask)
        raise Fault("a block without an end")

    def _branch(self, text: str) -> Array:
        found = re.fullmatch(r"br i1 (\S+), label %(\S+), label %(\S+)", text)
        if not found:
            return np.full(self.n, self.labels[text.rsplit("%", 1)[1]])
        yes, no = (self.labels[found.group(k)] for k in (2, 3))
        return np.where(self.value("i1", found.group(1)), yes, no)

    def _phi(self, name: str, text: str, mask: Array, before: Array) -> Array:
        found = re.match(r"phi (<\d+ x \w+>|\w+) (.*)", text)
        assert found
        kind = found.group(1)
        x = self.env[name].copy() if name in self.env else self._empty(kind)
        for value, label in re.findall(r"\[ (.*?), %([\w.]+) \]", found.group(2)):
            chosen = mask & (before == self.labels[label])
            if chosen.any():
                x[chosen] = self.value(kind, value)[chosen]
        return x

    def _set(self, name: str, x: Array, mask: Array) -> None:
        old = self.env.get(name)
        if old is not None and old.shape == x.shape and not mask.all():
            x = np.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, old)
        self.env[name] = x

    # ------------------------------------------------------------------------------ operands

    def _empty(self, kind: str) -> Array:
        found = VECTOR.fullmatch(kind)
        if found:
            return np.zeros((self.n, int(found.group(1))), NUMPY[found.group(2)])
        return np.zeros(self.n, NUMPY["ptr" if kind.startswith("ptr") else kind])

    def value(self, kind: str, text: str) -> Array:
        text = text.strip()
        if text[0] in "%@":
            return self.env[text]
        if text.startswith("getelementptr ("):
            return self.env["@shared"] + int(text.rstrip(")").rsplit(" ", 1)[1])
        x = self._empty(kind)
        if text in ("poison", "undef", "zeroinitializer", "null"):
            return x
        if text.startswith("splat"):
            text = text[text.index("(") + 1 : -1].split()[1]
        if text[0] == "<":
            numbers = [self._number(part.split()[1]) for part in text[1:-1].split(",")]
        else:
            numbers = [self._number(text)]
        if x.dtype.kind == "i":  # literals may be written without a sign
            numbers = [np.array(n & (1 << 64) - 1, np.uint64).astype(x.dtype) for n in numbers]
        x[:] = numbers if len(numbers) > 1 else numbers[0]
        return x

    @staticmethod
    def _number(text: str) -> Any:
        if text in ("true", "false"):
            return text == "true"
        if text.startswith("0x"):
            return np.frombuffer(int(text, 16).to_bytes(8, "little"), np.float64)[0]
        return float(text) if "." in text else int(text)

    def operands(self, text: str) -> list[Array]:
        """Of `kind a, b`."""
        found = re.match(r"(<\d+ x \w+>|ptr addrspace\(3\)|\w+) (.*)", text)
        assert found, text
        return [self.value(found.group(1), part) for part in split_arguments(found.group(2))]

    # ------------------------------------------------------------------------------ memory

    def _where(
        self, p: Array, size: int, align: int, mask: Array
    ) -> list[tuple[int, Array, Array]]:
        """(number of a buffer, threads, first bytes) of an access."""
        numbers, offsets = p >> HIGH, p & ((1 << HIGH) - 1)
        if (offsets[mask] % align).any():
            raise Fault(f"misaligned for align {align}")
        found = []
        for number in np.unique(numbers[mask]):
            if not 1 <= number <= len(self.buffers):
                raise Fault("a pointer from nowhere")
            threads = np.nonzero(mask & (numbers == number))[0]
            first, length = offsets[threads], self.buffers[number - 1].size
            if (first + size > length).any():
                raise Fault(f"argument {number - 1}: byte {first.max()} + {size} of {length}")
            found.append((int(number) - 1, threads, first))
        return found

    def _watch(self, number: int, threads: Array, places: Array, storing: bool) -> None:
        who = np.broadcast_to(threads[:, None], places.shape)
        if not self.shared or number != self.shared_at:
            if number not in self.free and not storing:
                self._seen(number, who, places)
            if storing and number not in self.free:
                owners = self.owners[number]
                if owners is None:
                    owners = self.owners[number] = np.full(self.buffers[number].size, -1)
                if ((owners[places] != -1) & (owners[places] != who)).any():
                    raise Fault(f"argument {number}: two threads store to one place")
                owners[places] = who
                if (owners[places] != who).any():
                    raise Fault(f"argument {number}: two threads store to one place at once")
                tags = self.tags.setdefault(number, np.zeros((3, owners.size), np.int64))
                now = self.epoch[self.block[who]], self.warp_epoch[who], self.fences[who]
                for tag, x in zip(tags, now, strict=True):
                    tag[places] = x
            return
        now = self.epoch[self.block[who]]
        if ((self.written_at[places] == now) & (self.writer[places] != who)).any():
            raise Fault("shared memory that another thread wrote, before a barrier")
        if storing:
            if ((self.read_at[places] == now) & (self.reader[places] != who)).any():
                raise Fault("shared memory that another thread still reads")
            self.writer[places], self.written_at[places] = who, now
        else:
            self.reader[places], self.read_at[places] = who, now

    def _seen(self, number: int, who: Array, places: Array) -> None:
        """Threads that read what others of this kernel have stored must be told of it."""
        owners = self.owners[number]
        if owners is None:
            return
        other = (owners[places] != -1) & (owners[places] != who)
        reader, writer, at = who[other], owners[places][other], places[other]
        if not reader.size:
            return
        block, warp, fences = self.tags[number]
        told = block[at] < self.epoch[self.block[reader]]
        told |= (reader // WARP == writer // WARP) & (warp[at] < self.warp_epoch[reader])
        away = self.block[reader] != self.block[writer]
        for own in np.unique(self.block[reader[away]]):
            mine = away & (self.block[reader] == own)
            known = self.known.get(int(own), np.zeros(self.n, np.int64))
            told[mine] = fences[at[mine]] < known[writer[mine]]
        if not told.all():
            raise Fault(f"argument {number}: read before it is known what another thread stored")

    def _count(self, memory: Array, places: Array, threads: Array, x: Array) -> Array:
        """Additions one after the other; who comes later knows of those who came before."""
        seen = np.zeros_like(x)
        for thread, place in zip(threads, places, strict=True):
            seen[thread] = memory[place]
            memory[place] += x[thread]
            block = int(self.block[thread])
            own = np.where(self.block == block, self.settled, 0)
            told = self.counters.get(int(place), np.zeros(self.n, np.int64))
            told = np.maximum(told, np.maximum(own, self.known.get(block, own)))
            self.counters[int(place)] = told
            self.met[block] = told
        return seen

    def _load(self, text: str, mask: Array) -> Array:
        found = re.fullmatch(
            r"load (<.*?>|\w+), (ptr\S*(?: addrspace\(3\))?) (.*), align (\d+)", text
        )
        assert found, text
        kind, p = found.group(1), self.value("ptr", found.group(3))
        out = self._empty(kind)
        several = VECTOR.fullmatch(kind)
        one, count = (several.group(2), int(several.group(1))) if several else (kind, 1)
        size, flat = BYTES[one], out.reshape(self.n, count)
        for number, threads, first in self._where(p, size * count, int(found.group(4)), mask):
            places = first[:, None] + np.arange(count) * size
            self._watch(number, threads, places, False)
            raw = self.buffers[number][places[:, :, None] + np.arange(size)]
            bits = np.ascontiguousarray(raw).view(f"u{size}")[:, :, 0]
            if one == "bfloat":
                flat[threads] = (bits.astype(np.uint32) << 16).view(np.float32)
            else:
                flat[threads] = bits.view(NUMPY[one])
        return out

    def _bits(self, one: str, x: Array) -> Array:
        if one == "bfloat":
            return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
        return np.ascontiguousarray(x).view(f"u{BYTES[one]}")

    def _store(self, text: str, mask: Array) -> None:
        value, place, align = split_arguments(text.removeprefix("store "))
        kind, x = typed(value)
        several = VECTOR.fullmatch(kind)
        one, count = (several.group(2), int(several.group(1))) if several else (kind, 1)
        bits = self._bits(one, self.value(kind, x).reshape(self.n, count))
        size, p = BYTES[one], self.value(*typed(place))
        for number, threads, first in self._where(p, size * count, int(align.split()[1]), mask):
            places = first[:, None] + np.arange(count) * size
            self._watch(number, threads, places, True)
            raw = np.ascontiguousarray(bits[threads]).view(np.uint8).reshape(-1, count, size)
            self.buffers[number][places[:, :, None] + np.arange(size)] = raw

    def _atomicrmw(self, text: str, mask: Array) -> Array:
        found = re.fullmatch(r"atomicrmw (\w+) ptr (\S+), (\w+) (\S+) monotonic", text)
        assert found, text
        op, kind = found.group(1), found.group(3)
        p, x = self.value("ptr", found.group(2)), self.value(kind, found.group(4))
        how: Any = {
            "fadd": np.add, "add": np.add, "min": np.minimum, "max": np.maximum,
            "umin": np.minimum, "umax": np.maximum,
        }[op]  # fmt: skip
        for number, threads, first in self._where(p, BYTES[kind], BYTES[kind], mask):
            memory: Array = self.buffers[number].view(NUMPY[kind])
            values = x
            if number in self.counts:
                return self._count(memory, first // BYTES[kind], threads, x)
            if op[0] == "u":
                memory, values = unsigned(memory), unsigned(x)
            how.at(memory, first // BYTES[kind], values[threads])
        return x

    def _cmpxchg(self, text: str, mask: Array) -> Array:
        found = re.match(r"cmpxchg ptr (\S+), (\w+) (\S+), \w+ (\S+) ", text)
        assert found, text
        kind = found.group(2)
        p = self.value("ptr", found.group(1))
        old, new = self.value(kind, found.group(3)), self.value(kind, found.group(4))
        seen = old.copy()
        for number, threads, first in self._where(p, BYTES[kind], BYTES[kind], mask):
            memory: Array = self.buffers[number].view(NUMPY[kind])
            for thread, place in zip(threads, first // BYTES[kind], strict=True):
                seen[thread] = memory[place]
                if seen[thread] == old[thread]:
                    memory[place] = new[thread]
        self.exchanged = seen == old
        return seen

    def _extractvalue(self, text: str, mask: Array) -> Array:
        return self.exchanged if text.endswith("1") else self.env[text.split()[-2].rstrip(",")]

    def _getelementptr(self, text: str, mask: Array) -> Array:
        kind, place, index = split_arguments(text.removeprefix("getelementptr "))
        start = self.value(*typed(place))
        return start + self.value(*typed(index)).astype(np.int64) * BYTES[kind]

    def _addrspacecast(self, text: str, mask: Array) -> Array:
        return self.env[text.split(" to ")[0].split()[-1]]

    # ------------------------------------------------------------------------------ values

    def _extractelement(self, text: str, mask: Array) -> Array:
        whole, index = split_arguments(text.removeprefix("extractelement "))
        x, place = self.value(*typed(whole)), self.value(*typed(index))
        return x[np.arange(len(x)), np.minimum(place, x.shape[1] - 1)]

    def _insertelement(self, text: str, mask: Array) -> Array:
        whole, one, index = split_arguments(text.removeprefix("insertelement "))
        x = self.value(*typed(whole)).copy()
        x[:, int(index.split()[1])] = self.value(*typed(one))
        return x

    def _shufflevector(self, text: str, mask: Array) -> Array:
        a, b, picks = split_arguments(text.removeprefix("shufflevector "))
        both = np.concatenate([self.value(*typed(a)), self.value(*typed(b))], 1)
        found = VECTOR.match(picks)
        assert found
        if picks.endswith("zeroinitializer"):
            return both[:, [0] * int(found.group(1))]
        return both[:, [int(x) for x in re.findall(r"i32 (\d+)", picks[found.end() :])]]

    def _select(self, text: str, mask: Array) -> Array:
        condition, a, b = (self.value(*typed(x)) for x in split_arguments(text[7:]))
        if condition.ndim < a.ndim:
            condition = condition[:, None]
        return np.where(condition, a, b)

    def _freeze(self, text: str, mask: Array) -> Array:
        return self.value(*typed(text.removeprefix("freeze ")))

    def _fneg(self, text: str, mask: Array) -> Array:
        return -self.value(*typed(text.removeprefix("fneg ")))

    def _icmp(self, text: str, mask: Array) -> Array:
        _, how, rest = text.split(" ", 2)
        a, b = self.operands(rest)
        if how[0] == "u":
            a, b = unsigned(a), unsigned(b)
        return COMPARED[how if how in ("eq", "ne") else how[1:]](a, b)

    def _fcmp(self, text: str, mask: Array) -> Array:
        _, how, rest = text.split(" ", 2)
        a, b = self.operands(rest)
        unordered = np.isnan(a) | np.isnan(b)
        if how in ("uno", "ord"):
            return unordered if how == "uno" else ~unordered
        found = COMPARED[how[1:]](a, b)
        return found | unordered if how[0] == "u" else found & ~unordered

    def _convert(self, word: str, text: str) -> Array:
        found = re.fullmatch(rf"{word} (<\d+ x \w+>|\w+) (.*) to (<\d+ x \w+>|\w+)", text)
        assert found, text
        x = self.value(found.group(1), found.group(2))
        several = VECTOR.fullmatch(found.group(3))
        kind = several.group(2) if several else found.group(3)
        result = NUMPY.get(kind, np.int64)
        if word == "ptrtoint":
            return x
        if word == "bitcast":
            source = VECTOR.fullmatch(found.group(1))
            one = source.group(2) if source else found.group(1)
            if one == "i1":
                return (x * (1 << np.arange(x.shape[1]))).sum(1)
            bits = self._bits(one, x)
            if several and source and several.group(1) != source.group(1):  # two of each
                bits = np.ascontiguousarray(bits).view(np.uint16)
            if kind == "bfloat":
                return (bits.astype(np.uint32) << 16).view(np.float32)
            return bits.view(result)
        if word == "fptrunc" and kind == "bfloat":
            return to_bfloat16(x)
        if word in ("zext", "uitofp"):
            return unsigned(x).astype(result)
        if word == "sext" and x.dtype == np.bool_:
            return -x.astype(result)
        if word == "trunc" and kind == "i1":
            return (x & 1).astype(np.bool_)
        if word == "fptosi":
            info = np.iinfo(result)
            top = np.nextafter(x.dtype.type(2.0 ** (info.bits - 1)), x.dtype.type(0))
            x = np.clip(np.nan_to_num(x), info.min, top)
        return x.astype(result)

    def _arithmetic(self, text: str, mask: Array) -> Array:
        word, rest = text.split(" ", 1)
        if " to " in text:
            return self._convert(word, text)
        a, b = self.operands(rest.removeprefix("nsw "))
        if word in BINARY:
            if a.dtype == np.bool_ and word in ("add", "sub"):
                return a ^ b
            return np.asarray(BINARY[word](a, b), a.dtype)
        x, y = (unsigned(a), unsigned(b)) if word[0] in "ul" else (a, b)
        if word == "lshr":
            return (x >> y).astype(a.dtype)
        y = np.where(y == 0, 1, y)
        if word in ("udiv", "urem"):
            return (x // y if word == "udiv" else x % y).astype(a.dtype)
        quotient = np.trunc(x / y).astype(a.dtype) if a.dtype.itemsize < 8 else _divided(x, y)
        return quotient if word == "sdiv" else (a - quotient * b).astype(a.dtype)

    # ------------------------------------------------------------------------------ calls

    def _call(self, text: str, mask: Array) -> Array | None:
        found = re.fullmatch(r"call (<\d+ x \w+>|\w+) @([\w.]+)\((.*)\)", text)
        assert found, text
        name = found.group(2)
        if name == "__assertfail":
            raise IndexError
        given = [self.value(*typed(x)) for x in split_arguments(found.group(3))]
        if "sreg" in name:
            return self.block if "ctaid" in name else self.tid
        if "barrier" in name or "bar.warp" in name:
            self._meet(mask, WARP if "warp" in name else self.threads)
            self.warp_epoch[mask] += 1
            if "warp" not in name or self.threads <= WARP:
                self.epoch[np.unique(self.block[mask])] += 1
                self.settled[mask] = self.fences[mask]
            return None
        if "shfl" in name:
            self._meet(mask, WARP)
            distance = int(given[2][0])
            lanes = min(WARP, self.threads)
            assert distance < lanes, "a lane that is not there is read"
            return given[1].reshape(-1, lanes)[:, np.arange(lanes) ^ distance].reshape(-1)
        if name.startswith("llvm.nvvm.membar"):
            self.fences[mask] += 1
            for block in np.unique(self.block[mask]):
                if int(block) in self.met:
                    self.known[int(block)] = self.met[int(block)]
            return None
        if name.startswith("fusee_"):
            return self._library(name.removeprefix("fusee_"), given)
        return self._intrinsic(name.removeprefix("llvm."), given)

    def _meet(self, mask: Array, together: int) -> None:
        rows = mask.reshape(-1, min(together, self.threads))
        if (rows.any(1) & ~rows.all(1)).any():
            raise Fault(f"not all of {together} threads have come")

    @staticmethod
    def _library(name: str, given: list[Array]) -> Array:
        tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in given]
        short = name.removesuffix("f") if name != "erf" else name
        own: dict[str, Callable[..., torch.Tensor]] = {
            "tgamma": torch.special.gammaln, "fabs": torch.abs,
        }  # fmt: skip
        function = own.get(short) or getattr(torch, short)
        return np.asarray(function(*tensors).numpy())

    @staticmethod
    def _intrinsic(name: str, given: list[Array]) -> Array:
        a, *rest = given
        if name.startswith("nvvm."):
            return np.asarray(NVVM[name.removeprefix("nvvm.")](*given), np.float32)
        short = re.sub(r"\.(v\d+)?[fi]\d+$", "", name)
        if short == "fma":
            return (a.astype(np.float64) * rest[0] + rest[1]).astype(a.dtype)
        if short == "fshr":
            wide = (unsigned(a).astype(np.uint64) << np.uint64(32)) | unsigned(rest[0])
            return (
                (wide >> (unsigned(rest[1]) % 32).astype(np.uint64)).astype(np.uint32).view(a.dtype)
            )
        if short in ("umin", "umax"):
            how = np.minimum if short == "umin" else np.maximum
            return how(unsigned(a), unsigned(rest[0])).view(a.dtype)
        if short.startswith("vector.reduce"):
            return np.asarray(a.all(1) if short.endswith("and") else a.any(1))
        if short == "cttz":
            return np.asarray([(x & -x).bit_length() - 1 if x else 64 for x in a.tolist()])
        functions: dict[str, Callable[..., Any]] = {
            "fabs": np.abs, "abs": lambda x, _: np.abs(x), "copysign": np.copysign,
            "smin": np.minimum, "smax": np.maximum, "sqrt": np.sqrt, "floor": np.floor,
            "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "maximum": np.maximum,
            "minimum": np.minimum,
        }  # fmt: skip
        return np.asarray(functions[short](a, *rest), a.dtype)


def _divided(x: Array, y: Array) -> Array:
    """64-bit numbers, to zero."""
    quotient = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)
