"""Random Python programs as source text, each from its seed.

A program is a module: globals, classes and functions that stay the same (`PREAMBLE`), a function
`fn` of random statements that closes over two variables, and `inputs(k)`, the arguments of call k.
Statements mix what Python does (containers, loops, closures, exceptions, managers, generators,
classes) with tensor operations, operations in place, views, and branches on tensors' values. Each
program is about a few themes besides (themes.py), whose rows it prefers.

The grammar is typed loosely: most programs run through, some raise, which is a result as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.capturing import themes, themes_of_python
from tests.capturing.themes import Rows, Theme
from tests.capturing.vocabulary import EXPRESSIONS, PREAMBLE, SIMPLE

__all__ = ["program"]

THEMES = {**themes.THEMES, **themes_of_python.THEMES}

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

# What may be done between two calls.
CHANGES = [
    "COUNT = 8", "SCALE = 2.0", "WEIGHT = torch.ones(4)", "TABLE['a'] = 4", "NAMES.append('z')",
    "TABLE = {'q': 1, 'a': 2}", "Box.total = 8", "WEIGHT.mul_(2)", "WEIGHT = WEIGHT.double()",
    "Box.bump = lambda self, by=1: by", "Record.size = 3", "log.clear()", "NAMES.clear()",
]  # fmt: skip

GLOBALS = ["COUNT", "SCALE", "WEIGHT", "TABLE", "NAMES", "global_box"]

# The name of a value that a block makes: see themes.py.
NEW_NAME = re.compile(r"\{(\d)(?::(\w+)(!)?)?\}")

# Kinds of values that a variable is given: see vocabulary.py.
ASSIGNED = "I I I F B S T T T T V LI LI LT LS D M SE O FN P R SL G".split()


class Writer:
    """Writes the statements of one function. `known` has the variables in scope, by kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        count = self.random.choice([0, 1, 1, 2, 2, 3])
        self.themes: list[Theme] = [THEMES[k] for k in self.random.sample([*THEMES], count)]
        self.rows: Rows = {}
        for theme in self.themes:
            for kind, rows in theme.expressions.items():
                self.rows.setdefault(kind, []).extend(rows)
        self.statements = [row for theme in self.themes for row in theme.statements]
        self.managers = [row for theme in self.themes for row in theme.managers]
        self.blocks = [row for theme in self.themes for row in theme.blocks]
        self.kinds = [*ASSIGNED, *(kind for kind in self.rows if kind not in EXPRESSIONS)]
        parameters = [row for theme in self.themes for row in theme.parameters]
        self.parameters = [*PARAMETERS, *parameters]
        written = re.findall(r"^([A-Z_]+)\b.* = ", "".join(t.preamble for t in self.themes), re.M)
        self.globals = "global " + ", ".join([*GLOBALS, *written])
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

    def name(self, kind: str) -> str | None:
        """A variable that may be assigned to."""
        names = [name for name in self.known.get(kind, []) if name.isidentifier()]
        return self.random.choice(names) if names else None

    # ---------------------------------------------------------------------- expressions

    def value(self, kind: str, depth: int = 2) -> str:
        """An expression of a kind; of few parts where `depth` is small."""
        found = self.variable(kind)
        if found is not None and (depth <= 0 or self.chance(0.4)):
            return found
        makers = EXPRESSIONS.get(kind) or self.rows[kind]
        if kind in self.rows and depth > 0 and self.chance(0.5):
            makers = self.rows[kind]
        text = self.random.choice(makers if depth > 0 else makers[:2])
        return self.filled(text, depth)

    def filled(self, text: str, depth: int) -> str:
        """A template, `<I>` and the like replaced by expressions of that kind, `<=I>` by names."""
        parts = text.split("<")
        out = [parts[0]]
        for part in parts[1:]:
            kind, closing, rest = part.partition(">")
            if closing and kind.startswith("="):
                out.append((self.name(kind[1:]) or "unused") + rest)
                continue
            if not closing or (kind not in EXPRESSIONS and kind not in self.rows):
                out.append("<" + part)
                continue
            # Python 3.11 has no quotes inside the braces of an f-string
            made = self.value(kind, 0 if "f'" in text or 'f"' in text else depth - 1)
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
            if self.blocks and self.chance(0.4):
                self.several(self.random.choice(self.blocks))
            else:
                self.random.choice(COMPOUND)(self)
        elif self.chance(0.45):
            kind = self.random.choice(self.kinds)
            text = self.value(kind)
            name = self.variable(kind) if self.chance(0.25) else None
            if name is None or not name.startswith("v") or "(" in name:
                name = self.new()
            self.line(f"{name} = {text}")
            self.know(kind, name)
        else:
            rows = self.statements if self.statements and self.chance(0.6) else SIMPLE
            text = self.random.choice(rows)
            while text.startswith(("raise", "return")) and (not self.depth or self.chance(0.3)):
                text = self.random.choice(rows)  # else most programs would end early
            self.line(self.filled(self.with_target(text), 2))

    def several(self, text: str) -> None:
        """A theme's statement of several lines."""
        before = {kind: list(names) for kind, names in self.known.items()}
        names: dict[str, str] = {}
        lasting: list[tuple[str, str]] = []

        def named(found: re.Match[str]) -> str:
            number, kind, stays = found.groups()
            if number not in names:
                names[number] = self.new()
            if kind:
                made.append((kind, names[number]))
                if stays:
                    lasting.append((kind, names[number]))
            return names[number]

        outer = self.depth
        for line in text.split("\n"):
            made: list[tuple[str, str]] = []
            words = NEW_NAME.sub(named, line.lstrip()).replace("{{", "{").replace("}}", "}")
            self.depth = outer + (len(line) - len(line.lstrip())) // 4
            if words == "...":
                self.depth -= 1
                self.short()
            else:
                self.line(self.filled(words, 1))
            for kind, name in made:
                self.know(kind, name)
        self.depth = outer
        self.known = before
        for kind, name in lasting:
            self.know(kind, name)

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
        w.managers
        if w.managers and w.chance(0.6)
        else [
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
        w.line(w.globals)
        w.line("nonlocal total, kept, " + ", ".join(name for name, _, _ in w.parameters))


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
    for theme in w.themes:
        for kind, names in theme.state.items():
            w.known.setdefault(kind, []).extend(names)
    for name, kind, _ in w.parameters:
        w.know(kind, name)
    for _ in range(w.random.choice([3, 5, 8, 12])):
        w.statement()
    w.line(f"return {w.value('T', 1)}, {w.value('LI', 1)}, {w.value(w.random.choice(w.kinds), 1)}")
    header = ", ".join(name for name, _, _ in w.parameters)
    text = [PREAMBLE, *(theme.preamble for theme in w.themes)]
    text += ["", "def outer(total, kept):", f"    def fn({header}):", f"        {w.globals}"]
    text += ["        nonlocal total, kept", *w.lines, "    return fn", "", "fn = outer(2, [7, 8])"]
    return "\n".join([*text, *_around(w), *_inputs(w, header)]) + "\n"


def _inputs(w: Writer, names: str) -> list[str]:
    """The arguments of each call, and what changes outside before it."""
    text = ["", "def inputs(k):", f"    {w.globals}"]
    changes = [row for theme in w.themes for row in theme.changes] + CHANGES
    same = {name: w.random.choice(options) for name, _, options in w.parameters}
    is_same = w.chance(0.3)  # the same arguments each time: what changes is outside
    for k in range(3):
        text.append(f"    if k == {k}:")
        if k and w.chance(0.4):
            text += [f"        {row}" for row in w.random.sample(changes, w.random.choice([1, 2]))]
        for name, _, options in w.parameters:
            drawn = same[name] if is_same else w.random.choice(options)
            text.append(f"        {name} = {drawn}")
        if w.chance(0.06):
            text.append("        x.requires_grad_()")
    return [*text, f"    return [{names}]"]


def _around(w: Writer) -> list[str]:
    """The manager that each call runs in."""
    managers = [row for theme in w.themes for row in theme.around]
    if not managers or w.chance(0.6):
        return []
    drawn = [w.random.choice([*managers, "contextlib.nullcontext()"]) for _ in range(3)]
    return ["", "def around(k):", f"    return [lambda: {', lambda: '.join(drawn)}][k]()"]
