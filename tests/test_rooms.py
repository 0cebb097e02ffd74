"""The house's plan, tested: who may import whom, where MLX may live, who reads the environment."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headrace"

RULES: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "clients": set(),
    "config": {"knobs", "tool_calls"},
    "config_loading": {"config", "errors", "knobs"},
    "knobs": {"errors"},
    "cancellation": set(),
    "common_prefix": set(),
    "isolation": {"errors", "cancellation"},
    "lru_cache": set(),
    "recent_times": set(),
    "messages": set(),
    "sandbox": {"cancellation", "messages"},
    "long_work": {"cancellation"},
    "tool_calls": {"types"},
    "families": {"types", "tool_calls"},
    "prefix": {"types", "common_prefix", "isolation"},
    "metrics": {"types"},
    "scheduler": {"types", "prefix", "errors", "recent_times"},
    "api": {"types", "errors"},
    "page": {"errors", "sandbox"},
    "grammar": {"types", "isolation", "tool_calls", "errors", "sandbox", "cancellation", "lru_cache"},
    "text": {
        *("types", "errors", "isolation", "sandbox", "cancellation", "long_work", "lru_cache"),
        *("tool_calls", "families", "common_prefix"),
    },
    "media": {"types", "isolation", "families", "errors", "sandbox", "cancellation"},
    "ranks": {"errors"},
    "backend": {"config_loading"},
    "state": {"types", "common_prefix", "isolation", "prefix", "backend", "recent_times"},
    "sampling": {"types", "backend"},
    "models": {"types", "cancellation", "isolation", "lru_cache", "families", "state", "backend", "errors"},
    "speculate": {"types", "isolation", "models", "state", "sampling", "backend", "recent_times"},
    "engine": {
        *("types", "errors", "config", "config_loading", "families", "prefix", "metrics", "scheduler", "grammar"),
        *("isolation", "cancellation", "common_prefix", "lru_cache", "messages", "recent_times"),
        *("backend", "state", "sampling", "models", "speculate", "ranks"),
    },
    "session": {
        *("types", "errors", "sandbox", "cancellation", "long_work", "lru_cache", "common_prefix"),
        *("engine", "text", "media", "grammar", "tool_calls", "families"),
    },
    "server": {
        *("types", "errors", "isolation", "cancellation", "long_work", "config", "config_loading"),
        *("session", "api", "page", "engine", "metrics", "clients"),
    },
    "replicas": {
        *("errors", "config", "config_loading", "long_work"),
        *("api", "metrics", "session", "server"),
    },
    "bench": {"types", "isolation", "errors"},
    "cli": {
        *("types", "errors", "config", "config_loading", "knobs", "server", "session", "engine", "models", "bench"),
        *("backend", "clients", "messages", "replicas", "ranks"),
    },
    "__main__": {"cli"},
    "__init__": set(),
}
"""What each room may import. A room may always import itself and the package's own `__init__` (the version)."""

PURE = {
    "common_prefix",
    "types",
    "tool_calls",
    "families",
    "text",
    "media",
    "grammar",
    "prefix",
    "scheduler",
    "metrics",
    "api",
    "clients",
    "page",
    "config",
    "config_loading",
    "knobs",
    "cancellation",
    "isolation",
    "lru_cache",
    "ranks",
    "recent_times",
    "long_work",
    "messages",
    "sandbox",
    "errors",
}

OUTER = {"session", "server", "replicas", "cli", "bench"}
"""They use the engine by its facade, and arrays not at all."""

ARRAYS = {"mlx", "mlx_lm", "mlx_vlm"}

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


@dataclass(frozen=True)
class Import:
    """One imported module, with the file and line that import it."""

    path: Path
    line: int
    module: str
    is_type_only: bool

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def source_files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py"))


@functools.cache
def imports_of(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text(), str(path))
    type_only = {id(node) for block in ast.walk(tree) if is_type_block(block) for node in ast.walk(block)}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import"
            # `from headrace import x` imports the module headrace.x, if there is one.
            names = [joined(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and is_import_call(node):
            names = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        found += [Import(path, node.lineno, name, id(node) in type_only) for name in names]
    return found


def is_type_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_import_call(node: ast.Call) -> bool:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def joined(module: str, name: str) -> str:
    return f"headrace.{name}" if module == "headrace" and (SOURCE / name).with_suffix(".py").exists() else module


def all_imports() -> Iterator[Import]:
    for path in source_files():
        yield from imports_of(path)


def target_room(module: str) -> str | None:
    """The room of a module of ours; None for others' modules and for the package itself."""
    first, *rest = module.split(".")
    return rest[0] if first == "headrace" and rest else None


def test_every_room_is_on_the_plan() -> None:
    assert {room_of(path) for path in source_files()} <= RULES.keys()


@pytest.mark.parametrize("room", sorted(RULES))
def test_a_room_imports_only_what_the_plan_allows(room: str) -> None:
    strangers = [
        found.where
        for found in all_imports()
        if room_of(found.path) == room and target_room(found.module) not in {None, room, *RULES[room]}
    ]
    assert strangers == []


@pytest.mark.parametrize("room", sorted(PURE | OUTER))
def test_no_room_outside_of_metal_imports_arrays(room: str) -> None:
    strangers = [
        found.where for found in all_imports() if room_of(found.path) == room and found.module.split(".")[0] in ARRAYS
    ]
    assert strangers == []


@pytest.mark.parametrize("room", ["session", "server"])
def test_the_engine_is_used_by_its_facade(room: str) -> None:
    inside = [
        found.where
        for found in all_imports()
        if room_of(found.path) == room
        and target_room(found.module) == "engine"
        and found.module != "headrace.engine.engine"
    ]
    assert inside == []


def test_the_plan_has_no_cycle() -> None:
    left = {room: set(allowed) for room, allowed in RULES.items()}
    while free := {room for room, allowed in left.items() if not allowed & left.keys()}:
        for room in free:
            del left[room]
    assert left == {}


def test_modules_within_a_room_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in source_files():
        module = ".".join(("headrace", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        graph[module] = {found.module for found in imports_of(path) if not found.is_type_only}
    while free := {module for module, imported in graph.items() if not (imported - {module}) & graph.keys()}:
        for module in free:
            del graph[module]
    assert graph == {}


def test_one_file_reads_the_environment() -> None:
    readers = []
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
            is_import = isinstance(node, ast.ImportFrom) and any(a.name in {"environ", "getenv"} for a in node.names)
            if is_attribute or is_import:
                readers.append(str(path.relative_to(SOURCE)))
    assert set(readers) == {"config_loading.py"}


def test_no_file_has_a_name_that_says_nothing() -> None:
    vague = [
        str(path.relative_to(ROOT))
        for path in (*source_files(), *(ROOT / "tests").rglob("*.py"))
        if VAGUE_NAMES & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    ]
    assert vague == []


def test_the_import_linter_contract_covers_every_pure_room_that_exists() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    wall = next(contract for contract in settings["contracts"] if contract["id"] == "wall")
    existing = {f"headrace.{room}" for room in PURE & {room_of(path) for path in source_files()}}
    assert set(wall["source_modules"]) == existing
    assert set(wall["forbidden_modules"]) == ARRAYS


def test_the_drawing_of_the_rooms_agrees_with_the_rules() -> None:
    drawing = (ROOT / "docs" / "structure.md").read_text().partition("flowchart TD")[2].partition("```")[0]
    edges = [tuple(line.split(" --> ")) for line in drawing.split("\n") if "-->" in line]
    arrows = [(importer.strip(), imported.strip()) for importer, imported in edges]
    assert [(a, b) for a, b in arrows if b not in RULES[a]] == []
    rooms = {each for each in RULES if (SOURCE / each).is_dir()}
    assert {each for arrow in arrows for each in arrow} == rooms
