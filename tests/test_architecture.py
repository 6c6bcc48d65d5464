"""The project's shape: who may import whom, how long files and functions are, their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fusee"

# Everything may import these; they import nothing of ours but one another, from right to left.
BASE = ("errors", "config", "log", "source")

# folder or module -> the folders it may import, itself and BASE apart.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "__init__": ("api", "backends", "capture", "compiler", "debug", "installed", "runtime"),
    "__main__": ("api", "backends", "capture", "debug", "installed", "runtime"),
    "installed": ("api", "backends", "capture", "compiler", "debug", "runtime"),
    "api": ("torch_functions", "capture", "backends", "runtime"),
    "compiler": ("api", "capture", "backends", "runtime"),
    "backends": ("autodiff", "aten", "fake", "loops", "codegen", "runtime", "sym", "targets"),
    "targets": ("autodiff", "aten", "fake", "loops", "codegen", "runtime", "sym"),
    "autodiff": ("aten", "sym", "fake", "loops"),
    "codegen": ("loops", "sym", "runtime"),
    "loops": ("sym",),
    "capture": ("sym", "fake", "runtime"),
    "torch_functions": ("capture",),
    "persist": ("capture", "fake", "sym", "runtime"),
    "fake": ("sym", "loops"),
    "aten": ("sym", "fake"),
    "debug": (
        "autodiff",
        "aten",
        "backends",
        "capture",
        "codegen",
        "loops",
        "runtime",
        "sym",
        "torch_functions",
    ),
    "runtime": (),
    "sym": (),
}

# module -> the modules that it imports by name when they are first needed, so that nobody waits for
# what is not used: what a public name stands for, an engine, our compiler beside an engine that has
# all of a graph, what is compiled for a device, capture's interpreter and captures on disk.
BY_NAME: dict[str, set[str]] = {
    "fusee": {"api", "backends", "compiler", "debug", "installed"},
    "fusee.api": {"persist", "torch_functions"},
    # engines take whole graphs without it
    "fusee.autodiff.partition": {"autodiff.trace"},
    "fusee.backends": {"backends.aot_autograd"},
    "fusee.backends.registry": {
        "aten.symbolic_shapes",
        "backends.aot_autograd",
        "backends.cudagraphs",
        "backends.kept",
        "backends.native",
        "backends.onnx",
        "backends.openvino",
        "backends.openvino.engine",
        "backends.split_run",
        "backends.tvm",
    },
    "fusee.backends.stock": {"api"},
    "fusee.backends.split_run": {"backends.native"},
    "fusee.capture.entries": {"capture.trace"},
    "fusee.targets": {"targets.cpu", "targets.cuda"},
}
# Not imported: names of modules whose functions are told apart.
NAMED_ALONE = {"fusee.capture.attributes", "fusee.capture.torch_api"}

LINES_OF_FILE = 800
LINES_OF_FUNCTION = 60
# Files that are tables: their length is the number of rows.
TABLES: dict[str, str] = {}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The folder or top module that the import table speaks of."""
    return module.split(".")[1] if "." in module else "__init__"


def own_imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of ours; `from fusee.a import b` may name fusee.a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [submodule(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "fusee")


def submodule(module: str, name: str) -> str:
    base = ROOT.joinpath(*module.split("."))
    if (base / f"{name}.py").exists() or (base / name / "__init__.py").exists():
        return f"{module}.{name}"
    return module


@pytest.mark.parametrize("path", sources(), ids=lambda path: module_of(path))
def test_file(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    where = str(path.relative_to(ROOT))
    assert path.stem not in VAGUE_NAMES, "say what is in the file"
    problems = [*import_faults(path, tree), *function_faults(tree)]
    if where not in TABLES and (length := len(text.splitlines())) > LINES_OF_FILE:
        problems.append((length, "split the file, or list it as a table"))
    assert not problems, "\n".join(f"{where}:{line}: {what}" for line, what in problems)


def import_faults(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    part = part_of(module_of(path))
    top_level = {node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    if part == "__init__":  # the package's public names are imported when first used
        top_level |= {line for line, _ in own_imports(path, tree)}
    for line, module in own_imports(path, tree):
        target = part_of(module)
        if line not in top_level:
            yield line, f"import of {module} inside a function or condition"
        if part in BASE:
            if target not in BASE[: BASE.index(part)]:
                yield line, f"{part} must not import {module}"
        elif part not in MAY_IMPORT:
            yield line, f"{part} is not in the import table"
        elif target != part and target not in (*BASE, "__init__", *MAY_IMPORT[part]):
            yield line, f"{part} must not import {module}"
        elif target == "__init__" and part not in ("__main__", "api"):
            yield line, "import the module that defines it, not the package"


def function_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LINES_OF_FUNCTION:
                yield node.lineno, f"{node.name} has {length} lines"


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_of(path))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_modules_imported_by_name_are_listed() -> None:
    found: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text[:6] == "fusee." != text and is_module(text):
                found.setdefault(module_of(path), set()).add(text.removeprefix("fusee."))
    assert {name: x for name, x in found.items() if name not in NAMED_ALONE} == BY_NAME


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def test_no_name_of_a_package_is_one_of_its_modules() -> None:
    """Importing the module would hide the name: `check` and `check.py` of one folder."""
    for path in sources():
        if path.name != "__init__.py":
            continue
        package, names = module_of(path), set[str]()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.module != package:
                names |= {alias.asname or alias.name for alias in node.names}
            else:
                names |= {
                    x.id
                    for x in ast.walk(node)
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
                }
        assert names.isdisjoint(x.stem for x in path.parent.glob("*.py")), path


def test_no_import_circles() -> None:
    edges: dict[str, set[str]] = {}
    for path in sources():
        module = module_of(path)
        found = {name for _, name in own_imports(path, ast.parse(path.read_text()))}
        edges[module] = found - {module}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in sorted(edges.get(module, ())):
                visit(other, (*above, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_tables_exist_and_are_long() -> None:
    for where, reason in TABLES.items():
        assert reason
        assert len((ROOT / where).read_text().splitlines()) > LINES_OF_FILE, "no exception needed"
