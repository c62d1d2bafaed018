"""Which file imports which: no circles, and nothing heavy or optional before it is needed."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flash_numba"
FILES = {
    ".".join(("flash_numba", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def statements(tree, within_functions):
    """All import statements, or those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif within_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(node, within_functions)


def imported(module, within_functions=False, files=FILES):
    """The package's own modules that a module names in its imports. (The folders that they lie in don't count.)"""
    path = files[module]
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in statements(ast.parse(path.read_text()), within_functions):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
            continue
        start = folder.split(".")[: len(folder.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        names |= {f"{base}.{name.name}" if f"{base}.{name.name}" in files else base for name in node.names}
    return {name for name in names if name in files and name != module}


def circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


@pytest.mark.parametrize("within_functions", [False, True])
def test_no_file_imports_itself_by_way_of_others(within_functions):
    graph = {module: imported(module, within_functions) for module in FILES}
    assert {"flash_numba.backend", "flash_numba.rules"} <= graph["flash_numba.checked"]
    assert circle(graph) is None


def test_circles_are_found(tmp_path):
    """As long as two files and as short, of each way to write an import."""
    texts = {"a": "from . import b", "b": "if True:\n    from .c import x", "c": "def f():\n    import p.a", "d": ""}
    files = {"p": tmp_path / "__init__.py"} | {f"p.{name}": tmp_path / f"{name}.py" for name in texts}
    files["p"].write_text("from .a import b")
    for name, text in texts.items():
        files[f"p.{name}"].write_text(text)
    assert circle({module: imported(module, False, files) for module in files}) is None
    assert set(circle({module: imported(module, True, files) for module in files})) == {"p.a", "p.b", "p.c"}


def test_importing_the_package_imports_neither_numba_nor_a_gpu():
    code = """
import sys, flash_numba
heavy = "numba", "llvmlite", "flash_numba.gpu", "flash_numba.bench", "typer", "rich", "torch", "cuda"
print([name for name in sys.modules if (name + ".").startswith(tuple(f"{h}." for h in heavy))])
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


# ---- the shape of the code: what CONTRIBUTING says of files, functions and places


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("module", FILES)
def test_files_and_functions_are_short(module):
    """At most 450 lines a file, and 80 a function besides its docstring."""
    text = FILES[module].read_text()
    assert text.count("\n") <= 450
    for function in functions(ast.parse(text)):
        body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
        assert function.end_lineno - body[0].lineno + 1 <= 80, function.name


def test_llvm_ir_and_ptx_stand_in_their_folders():
    outside = [module for module in FILES if ".ir" not in module]
    assert [module for module in outside if re.search(r"llvmlite import|InlineAsm", FILES[module].read_text())] == []


KERNELS = [module for module in FILES if module.startswith(("flash_numba.cpu.", "flash_numba.gpu."))]


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("the bounds of a row", r"\bp\.left\s*[-+]|[-+]\s*p\.(left|right)\b"),
        ("the running sum's update", r"\balpha\)?\s*\*\s*(lane\()?(load\()?l\b"),
        ("exp2 of a score", r"\bexp2\(.*-"),
        ("the word of a key", r"&\s*3\b(?!\d).*word|word.*&\s*3\b"),
        ("base 2", r"(sink|slope).*\* ?(scores\.)?LOG2E"),
    ],
)
def test_a_formula_stands_in_one_place(what, pattern):
    """Kernels call `geometry.py`, `recurrence.py`, `dropout.py` and `problem.py` for it."""
    found = [
        f"{module}: {line.strip()}"
        for module in KERNELS
        if not module.endswith("primitives")  # what exp2 is
        for line in FILES[module].read_text().splitlines()
        if re.search(pattern, line.partition("#")[0]) and '"""' not in line
    ]
    assert not found, what


def test_every_file_is_in_contributing():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    table = text[text.index("## Where to look") : text.index("## Recipes")]
    named = set(re.findall(r"[\w*]+\.py|\w+/", table))
    for module, path in FILES.items():
        folder = path.parent.name
        if folder in ("ir", "reference", "bench") or path.name == "__init__.py":
            assert f"{folder}/" in named or folder == "flash_numba" or folder in ("cpu", "gpu"), module
        else:
            assert any(fnmatch(path.name, name) for name in named), module
