"""The dependency direction, read from the source: each floor imports only from floors below it.

A *unit* is a module or package right under `raptor_hf`. Two units of one floor may use each other one way only, and
some not at all. Imports inside functions count; those under `if TYPE_CHECKING:` do not, as they never run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "raptor_hf"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 420

FLOORS = (
    {"errors"},
    {"validate", "limits"},
    {"privacy", "moe", "models", "data", "assets"},
    {"grad_sample"},
    {"checks", "probes", "methods", "arguments", "analysis", "hub"},
    {
        "streams",
        "config",
        "state",
        "callbacks",
        "optim",
        "evaluation",
        "records",
        "auto",
        "plan",
        "preflight",
        "distributed",
        "binding",
        "resume",
        "watch",
    },
    {"trainer"},
    {"audit"},
    {"scripts"},
    {"cli"},
)
FLOOR = {unit: level for level, units in enumerate(FLOORS) for unit in units}

# Neighbours on a floor that must stay strangers, so that each can be read without the other.
STRANGERS = {("privacy", "moe"), ("privacy", "models"), ("privacy", "data"), ("moe", "privacy")}

# All that the privacy core may stand on beside the standard library: an auditor reads it and nothing else.
PRIVACY_LIBRARIES = {"torch", "numpy", "scipy", "prv_accountant", "dp_accounting", "opacus"}


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node` that can run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and _is_type_checking(child):
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield statement
                yield from _running(statement)
            continue
        yield child
        yield from _running(child)


def imports(source: str, package: str) -> set[str]:
    """Dotted names that `source`, a module inside `package`, imports; `from a import b` counts as `a.b`."""
    found = set()
    for node in _running(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(filter(None, [*parents[: len(parents) - node.level + 1], node.module]))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT.parent).parent.parts)
    return imports(path.read_text(encoding="utf-8"), package)


def used_units(path: Path) -> set[str]:
    """Units that a file imports from; "" is the package's own `__init__`, which holds the public names."""
    used = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != PACKAGE or parts[1:] == ["__version__"]:
            continue
        used.add(parts[1] if len(parts) > 1 and parts[1] in FLOOR else "")
    return used - {unit_of(path)}


def used_libraries(path: Path) -> set[str]:
    tops = {name.split(".")[0] for name in imports_of(path)}
    return tops - {PACKAGE, "__future__"} - set(sys.stdlib_module_names)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


INNER = [path for path in FILES if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", INNER, ids=ids)
def test_imports_only_from_floors_below(path):
    unit = unit_of(path)
    assert unit in FLOOR, f"{ids(path)} stands on no floor: give `{unit}` one in FLOORS"
    for used in used_units(path):
        if used == "":
            # The public names pull in everything, the trainer too.
            assert FLOOR[unit] >= FLOOR["audit"], f"{ids(path)} imports the package's top: name the module instead"
            continue
        assert FLOOR[used] <= FLOOR[unit], f"{ids(path)} imports `{used}`, which is on a floor above `{unit}`"
        assert (unit, used) not in STRANGERS, f"{ids(path)} imports `{used}`: the two must not know each other"


def test_no_circles_on_a_floor():
    graph: dict[str, set[str]] = {unit: set() for unit in FLOOR}
    for path in INNER:
        graph.setdefault(unit_of(path), set()).update(used_units(path) - {""})
    done: set[str] = set()

    def visit(unit: str, trail: tuple[str, ...]) -> None:
        assert unit not in trail, f"circle: {' -> '.join((*trail, unit))}"
        if unit not in done:
            for used in graph[unit]:
                visit(used, (*trail, unit))
            done.add(unit)

    for unit in graph:
        visit(unit, ())


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) == "privacy"], ids=ids)
def test_privacy_core_stands_on_torch_numpy_and_accountants(path):
    extra = used_libraries(path) - PRIVACY_LIBRARIES
    assert not extra, f"{ids(path)} imports {', '.join(sorted(extra))}"


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) in ("hub", "analysis")], ids=ids)
def test_cards_and_verification_do_not_need_a_trainer(path):
    assert not used_units(path) & {"trainer", ""}


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) == "config"], ids=ids)
def test_config_touches_no_model_and_no_data(path):
    assert used_units(path) <= {"errors", "validate", "methods", "arguments"}
    assert used_libraries(path) <= {"transformers"}


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) == "cli"], ids=ids)
def test_command_line_stands_on_the_standard_library(path):
    assert not used_libraries(path)


@pytest.mark.parametrize("path", [p for p in FILES if unit_of(p) == "audit"], ids=ids)
def test_audit_keeps_to_the_public_side_of_the_trainer(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "trainer":
            assert not node.attr.startswith("_"), f"{ids(path)}:{node.lineno} uses trainer.{node.attr}"


def test_every_library_in_use_is_a_declared_dependency():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + extras["demo"] + extras["pld"]
    names = {re.split(r"[^\w.-]", requirement)[0].replace("-", "_") for requirement in declared}
    names = (names - {"pyyaml", "pillow"}) | {"yaml", "PIL"}
    used = {library for path in FILES for library in used_libraries(path)}
    assert not used - names


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_are_small(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{ids(path)} has {lines} lines: one responsibility a file"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import raptor_hf.moe.layout", {"raptor_hf.moe.layout"}),
        ("from raptor_hf import trainer, X", {"raptor_hf.trainer", "raptor_hf.X"}),
        ("from ..moe import lora", {"raptor_hf.moe.lora"}),
        ("from .. import moe", {"raptor_hf.moe"}),
        ("from . import noise", {"raptor_hf.privacy.noise"}),
        ("def f():\n    import peft.utils as u", {"peft.utils"}),
        ("if TYPE_CHECKING:\n    import peft\nelse:\n    import torch", {"torch"}),
    ],
)
def test_the_reader_of_imports(source, expected):
    assert imports(source, "raptor_hf.privacy") == expected
