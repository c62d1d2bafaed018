"""Which file imports which: no circles, and nothing heavy or optional before it is needed."""

import ast
import subprocess
import sys
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
