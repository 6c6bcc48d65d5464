"""Random Python programs as source text, each from its seed.

A program is a module: globals, classes and functions that stay the same (`PREAMBLE`), a function
`fn` of random statements that closes over two variables, and `inputs(k)`, the arguments of call k.
Statements mix what Python does (containers, loops, closures, exceptions, managers, generators,
classes) with tensor operations, operations in place, views, and branches on tensors' values.

The grammar is typed loosely: most programs run through, some raise, which is a result as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.capturing.vocabulary import EXPRESSIONS, PREAMBLE, SIMPLE

__all__ = ["program"]

# Parameters of `fn`: name, kind, and the expressions that its arguments are drawn from.
PARAMETERS: list[tuple[str, str, list[str]]] = [
    ("x", "T", ["torch.tensor([1.0, -2.0, 3.0, 0.5])", "torch.tensor([-1.0, -2.0, 0.0, 0.5])"]),
    (
        "y",
        "T",
        ["torch.tensor([2.0, 2.0, -1.0, 1.0])", "torch.ones(8)[::2]", "WEIGHT", "x", "x[:]"],
    ),
    ("n", "I", ["1", "2", "3", "4"]),
    ("flag", "B", ["True", "False"]),
    ("box", "O", ["Box(2, torch.ones(4))", "Box(3, x)", "Sub(2, torch.ones(4))", "Box(1, WEIGHT)"]),
    ("items", "LI", ["[1, 2, 3]", "[4, 5]", "[1, 2, 3, 4]", "[0, 2, 4]"]),
    ("table", "D", ["{'a': 1, 'b': 2}", "{'b': 2, 'a': 5}", "{'a': 1, 'b': 2, 'c': 3}", "TABLE"]),
    ("many", "LT", ["[torch.ones(4), torch.zeros(4)]", "[x, y]", "[x, x]", "[WEIGHT, y, x]"]),
]

STATE = {
    "I": ["COUNT", "total"],
    "F": ["SCALE"],
    "T": ["WEIGHT"],
    "D": ["TABLE"],
    "LS": ["NAMES"],
    "LI": ["kept"],
}

# Kinds of values that a variable is given: see vocabulary.py.
ASSIGNED = "I I I F B S T T T T V LI LI LT LS D M SE O FN P R SL G".split()


class Writer:
    """Writes the statements of one function. `known` has the variables in scope, by kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: dict[str, list[str]] = {}
        self.lines: list[str] = []
        self.depth = 0
        self.count = 0

    # ---------------------------------------------------------------------- small parts

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def know(self, kind: str, name: str) -> str:
        self.known.setdefault(kind, []).append(name)
        return name

    def line(self, text: str) -> None:
        self.lines.append("    " * (self.depth + 2) + text)

    def variable(self, kind: str) -> str | None:
        names = self.known.get(kind, [])
        return self.random.choice(names) if names else None

    # ---------------------------------------------------------------------- expressions

    def value(self, kind: str, depth: int = 2) -> str:
        """An expression of a kind; of few parts where `depth` is small."""
        found = self.variable(kind)
        if found is not None and (depth <= 0 or self.chance(0.4)):
            return found
        makers = EXPRESSIONS[kind]
        text = self.random.choice(makers if depth > 0 else makers[:2])
        return self.filled(text, depth)

    def filled(self, text: str, depth: int) -> str:
        """A template, `<I>` and the like replaced by expressions of that kind."""
        parts = text.split("<")
        out = [parts[0]]
        for part in parts[1:]:
            kind, closing, rest = part.partition(">")
            if not closing or kind not in EXPRESSIONS:
                out.append("<" + part)
                continue
            # Python 3.11 has no quotes inside the braces of an f-string
            made = self.value(kind, 0 if text.startswith("f'") else depth - 1)
            is_part = rest[:1] in (".", "[", "(") and (" " in made or made[0] in "-~0123456789")
            out.append(f"({made}){rest}" if is_part else made + rest)
        return "".join(out)

    # ---------------------------------------------------------------------- statements

    def block(self, length: int) -> None:
        """Statements one level deeper; what they assign is usually forgotten afterwards."""
        before = {kind: list(names) for kind, names in self.known.items()}
        self.depth += 1
        for _ in range(length):
            self.statement()
        if not length:
            self.line("pass")
        self.depth -= 1
        if self.chance(0.97):
            self.known = before

    def short(self) -> None:
        self.block(self.random.choice([1, 1, 2, 3]))

    def statement(self) -> None:
        if self.depth < 3 and self.chance(0.3):
            self.random.choice(COMPOUND)(self)
        elif self.chance(0.45):
            kind = self.random.choice(ASSIGNED)
            text = self.value(kind)
            name = self.variable(kind) if self.chance(0.25) else None
            if name is None or not name.startswith("v") or "(" in name:
                name = self.new()
            self.line(f"{name} = {text}")
            self.know(kind, name)
        else:
            text = self.random.choice(SIMPLE)
            while text.startswith(("raise", "return")) and (not self.depth or self.chance(0.3)):
                text = self.random.choice(SIMPLE)  # else most programs would end early
            self.line(self.filled(self.with_target(text), 2))

    def with_target(self, text: str) -> str:
        """A statement with what it assigns to, or changes, as a variable."""
        before, opening, rest = text.partition("<")
        kind, _, rest = rest.partition(">")
        if before not in ("", "del ") or not opening:
            return text
        name = self.variable(kind)
        return "pass" if name is None else f"{before}{name}{rest}"


def _if(w: Writer) -> None:
    w.line(f"if {w.value('B')}:")
    w.short()
    if w.chance(0.3):
        w.line(f"elif {w.value('B')}:")
        w.short()
    if w.chance(0.5):
        w.line("else:")
        w.short()


def _for(w: Writer) -> None:
    kind, source = w.random.choice(
        [
            ("I", "range(<I> % 4)"), ("I", "<LI>"), ("T", "<LT>"), ("S", "<D>"), ("I", "<G>"),
            ("I", "list(<SE>)"), ("I", "<O>"), ("I", "[*<LI>]"), ("T", "<V>.reshape(1, 4)"),
        ]
    )  # fmt: skip
    name = w.new()
    header = f"for {name} in {w.filled(source, 2)}:"
    if w.chance(0.3):
        index = w.new()
        header = f"for {index}, {name} in enumerate({w.filled(source, 2)}):"
    w.line(header)
    w.know(kind, name)
    _body_of_loop(w)


def _body_of_loop(w: Writer) -> None:
    w.short()
    if w.chance(0.4):
        w.depth += 1
        w.line(f"if {w.value('B', 1)}: {w.pick('break', 'continue')}")
        w.depth -= 1
        w.short()
    if w.chance(0.25):
        w.line("else:")
        w.short()


def _while(w: Writer) -> None:
    name = w.new()
    w.line(f"{name} = {w.value('I', 1)} % 4")
    also = w.pick("", f" and ({w.value('B', 1)})")
    w.line(f"while ({name} := {name} - 1) >= 0{also}:")
    w.know("I", name)
    _body_of_loop(w)


def _try(w: Writer) -> None:
    w.line("try:")
    w.short()
    if w.chance(0.85):
        kinds = ["ValueError", "Odd", "(KeyError, IndexError)", "Exception", "AttributeError"]
        for kind in w.random.sample(kinds, w.random.choice([1, 1, 2])):
            name = w.new()
            w.line(f"except {kind} as {name}:")
            w.depth += 1
            w.line(f"log.append((type({name}).__name__, str({name})))")
            if w.chance(0.15):
                w.line(w.pick("raise", f"raise KeyError('again') from {name}", "raise Odd(1)"))
            w.depth -= 1
            w.short()
        if w.chance(0.3):
            w.line("else:")
            w.short()
        if w.chance(0.6):
            return
    w.line("finally:")
    w.short()


def _with(w: Writer) -> None:
    name = w.new()
    manager = w.random.choice(
        [
            "Manager('m')", "Manager('s', swallow=True)", "torch.no_grad()", "managed('g')",
            "contextlib.suppress(ValueError)", "torch.enable_grad()", "Manager('p'), Manager('q')",
            "torch.set_grad_enabled(<B>)", "managed('f'), torch.no_grad()",
            "contextlib.nullcontext(<I>)",
        ]
    )  # fmt: skip
    as_name = f" as {name}" if w.chance(0.3) else ""
    w.line(f"with {w.filled(manager, 1)}{as_name}:")
    w.short()


# Patterns, and the kind of what each binds, if it binds a name.
PATTERNS = [
    ("0 | 1", ""), ("int({0})", "I"), ("[int({0}), *_]", "I"), ("[_, *{0}]", "LI"), ("[]", ""),
    ("{{'a': int({0})}}", "I"), ("{{'b': _, **{0}}}", "D"), ("Box(count={0})", "I"),
    ("Box(w={0}, double=2 | 4)", "T"), ("Pair(int({0}), _)", "I"), ("Sub() as {0}", "O"),
    ("str({0})", "S"), ("'a' | 'zz' as {0}", "S"), ("Record(size={0})", "I"), ("Pair(_, _, _)", ""),
]  # fmt: skip


def _match(w: Writer) -> None:
    w.line(f"match {w.value(w.pick('I', 'LI', 'D', 'O', 'P', 'S', 'R'))}:")
    w.depth += 1
    for pattern, kind in w.random.sample(PATTERNS, w.random.choice([1, 2, 3])):
        name = w.new()
        before = {k: list(names) for k, names in w.known.items()}
        if kind:
            w.know(kind, name)
        guard = f" if {w.value('B', 1)}" if w.chance(0.3) else ""
        w.line(f"case {pattern.format(name)}{guard}:")
        w.short()
        w.known = before
    if w.chance(0.6):
        w.line("case _:")
        w.short()
    w.depth -= 1


def _inner(body: Callable[[Writer], None], kind: str, header: str) -> Callable[[Writer], None]:
    """A function or class inside, of the given kind of value."""

    def write(w: Writer) -> None:
        name = w.new()
        w.line(header.format(name))
        before = {k: list(names) for k, names in w.known.items()}
        body(w)
        w.known = before
        if kind == "class":
            made = w.know("O", w.new())
            w.line(f"{made} = {name}({w.value('I', 1)}, {w.value('T', 1)})")
        else:
            w.know(kind, name if kind == "FN" else f"{name}({w.value('I', 0)})")

    return write


def _closure(w: Writer) -> None:
    shared = [n for n in w.known.get("I", []) if n.startswith("v")]
    w.depth += 1
    _declare(w)
    if shared and w.chance(0.6):
        name = w.random.choice(shared)
        w.line(f"nonlocal {name}")
        w.line(f"{name} = {name} + a")
    w.depth -= 1
    w.know("I", "a")
    w.short()
    w.depth += 1
    w.line(f"return {w.value('I')}")
    w.depth -= 1


def _declare(w: Writer) -> None:
    """What the enclosing scopes hold, which statements inside may assign to."""
    if w.chance(0.8):
        w.line("global COUNT, SCALE, WEIGHT, TABLE, NAMES, global_box")
        w.line("nonlocal total, kept, x, y, n, flag, box, items, many")


def _generator(w: Writer) -> None:
    w.know("I", "a")
    w.depth += 1
    _declare(w)
    w.line(f"yield {w.value('I')}")
    w.depth -= 1
    w.short()
    w.depth += 1
    w.line(w.pick("yield a", "yield from range(a % 3)", "yield from stepping(a)", "return 5"))
    w.depth -= 1


def _class(w: Writer) -> None:
    w.depth += 1
    w.line(f"limit = {w.value('I', 1)}")
    w.line("def bump(self, by=1):")
    w.depth += 1
    w.line(w.pick("return super().bump(by) + self.limit", "self.extra = by; return self.count"))
    w.depth -= 2


COMPOUND: list[Callable[[Writer], None]] = [
    _if, _if, _if, _for, _for, _while, _try, _try, _with, _with, _match,
    _inner(_closure, "FN", "def {}(a):"),
    _inner(_generator, "G", "def {}(a):"),
    _inner(_class, "class", "class {}(Box):"),
]  # fmt: skip


# ------------------------------------------------------------------------------ a program


def program(seed: int) -> str:
    """The source of one program."""
    w = Writer(seed)
    w.known = {kind: list(names) for kind, names in STATE.items()}
    for name, kind, _ in PARAMETERS:
        w.know(kind, name)
    for _ in range(w.random.choice([3, 5, 8, 12])):
        w.statement()
    w.line(f"return {w.value('T', 1)}, {w.value('LI', 1)}, {w.value(w.random.choice(ASSIGNED), 1)}")
    names = ", ".join(name for name, _, _ in PARAMETERS)
    text = [PREAMBLE, "", "def outer(total, kept):", f"    def fn({names}):"]
    text.append("        global COUNT, SCALE, WEIGHT, TABLE, NAMES, global_box")
    text.append("        nonlocal total, kept")
    text += [*w.lines, "    return fn", "", "fn = outer(2, [7, 8])", "", "def inputs(k):"]
    for k in range(3):
        text.append(f"    if k == {k}:")
        for name, _, options in PARAMETERS:
            text.append(f"        {name} = {w.random.choice(options)}")
        if w.chance(0.06):
            text.append("        x.requires_grad_()")
    text.append(f"    return [{names}]")
    return "\n".join(text) + "\n"
