"""Prints what the package consists of, counted from its sources: how much there is to know.

    python scripts/measures.py

The aims are those of docs/structure.md. A number is never worth a worse line.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "headrace"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
STEERING = ("recent_times.py", "scheduler/step_time_model.py", "speculate/", "state/disk_times.py", "engine/warm_up.py")
"""Where constants steer pacing and drafting."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> dict[str, ast.Module]:
    """The modules of the package, by their paths in it."""
    files = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in files}


def is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )


def constants(tree: ast.Module) -> Iterator[str]:
    """Names of a module's constants that are numbers, not counting those derived from others."""
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=True))
            yield from (name.id for name, value in pairs if isinstance(name, ast.Name) and _is_number(name, value))


def _is_number(name: ast.Name, value: ast.expr) -> bool:
    parts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
    is_derived = any(isinstance(part, ast.Name | ast.Call | ast.Tuple) for part in ast.walk(value))
    return name.id.upper() == name.id and not is_derived and all(isinstance(part, int | float) for part in parts)


def measures() -> dict[str, str]:
    """What is printed: each measure's name and its value."""
    modules = trees()
    nodes = [node for tree in modules.values() for node in ast.walk(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions = [node for node in nodes if isinstance(node, Function)]
    documented = sum(ast.get_docstring(node) is not None for node in functions)
    lengths = {name: (SOURCE / name).read_text().count("\n") for name in modules}
    of_benchmarks = sum(path.read_text().count("\n") for path in BENCHMARKS.glob("*.py"))
    short = [name for name, length in lengths.items() if length < 30 and not name.endswith("__init__.py")]
    steering = [name for path, tree in modules.items() if path.startswith(STEERING) for name in constants(tree)]
    return {
        "lines of Python; of benchmarks": f"{sum(lengths.values())}, {of_benchmarks}",
        "rooms": str(len({name.split("/")[0] for name in modules if "/" in name})),
        "files, of which under 30 lines": f"{len(modules)}, {len(short)}",
        "files over 400 lines": str(sum(length > 400 for length in lengths.values())),
        "classes, names used twice": f"{sum(classes.values())}, {sum(count > 1 for count in classes.values())}",
        "functions with a docstring": f"{documented / len(functions):.0%} of {len(functions)}",
        "functions over 60 lines": str(sum((node.end_lineno or 0) - node.lineno + 1 > 60 for node in functions)),
        "broad excepts": str(sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for node in nodes)),
        "constants in pacing and drafting": str(len(steering)),
    }


if __name__ == "__main__":
    for name, value in measures().items():
        print(f"{name:40} {value}")
