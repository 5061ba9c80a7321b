"""Owns the walls of the house: which file may import which, and the rules a parser can check.
Refuses to run any code of the library: it reads the source with ast.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# Imports go to strictly lower floors, or stay inside a package on its own floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "provenance", "config_mistakes"),
    ("config", "registry", "files", "held_out"),
    ("manifest",),
    ("artifacts",),
    ("models", "sampling", "lineage", "draft_tokens", "bundle"),
    (
        "vocab",
        "corpus",
        "losses",
        "logit_edits",
        "runtime.verify",
        "runtime.stats",
        "runtime.cache",
        "runtime.forward",
        "runtime.lean",
        "runtime.commit",
        "runtime.attention",
        "runtime.packing",
        "runtime.rotary",
    ),
    ("initialization", "drafters", "metrics", "target_store"),
    ("runtime", "runtime.decode", "runtime.speculative"),
    ("backends", "training", "server"),
    ("export", "report"),
    ("stages",),
)
ROOF = (("cli",), ("__main__",))

# Libraries that change often, or weigh much, and the only places that may know them.
BORDERS = {
    "accelerate": ("distill.training",),
    "datasketch": ("distill.corpus",),
    "evaluate": ("distill.metrics.evaluate_modules",),
    "fastapi": ("distill.server",),
    "filelock": ("distill.artifacts", "distill.models"),
    "matplotlib": ("distill.report",),
    "omegaconf": ("distill.config",),
    "prometheus_client": ("distill.server",),
    "starlette": ("distill.server",),
    "tenacity": ("distill.backends.http_retry",),
    "trl": ("distill.training",),
    "typer": ("distill.cli",),
    "uvicorn": ("distill.server",),
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("distill", "pipelines")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                yield node.lineno, longer if longer in SOURCES else str(node.module)


def floor_of(module: str) -> tuple[int, str]:
    """(floor, its entry) of a module of distill; the longest entry that fits wins."""
    name = module.removeprefix("distill.")
    entries = [(floor, entry) for floor, row in enumerate((*FLOORS, *ROOF)) for entry in row]
    fitting = [(len(e), floor, e) for floor, e in entries if name == e or name.startswith(f"{e}.")]
    assert fitting, f"{module} has no floor yet: add it to FLOORS, and to CONTRIBUTING.md"
    _, floor, entry = max(fitting)
    return floor, entry


def is_allowed(importer: str, imported: str) -> bool:
    if "distill" in (importer, imported):
        return True  # the lazy front door: it imports nothing until a name is asked for
    (above, _), (below, _) = floor_of(importer), floor_of(imported)
    same_package = importer.split(".")[:2] == imported.split(".")[:2]
    return below < above or (below == above and same_package)


def where(module: str, line: int) -> str:
    return f"{SOURCES[module].relative_to(REPOSITORY)}:{line}"


def is_command_line(module: str) -> bool:
    return module in ("distill.cli", "distill.__main__") or module.startswith("distill.cli.")


def test_every_module_stands_on_a_floor() -> None:
    for module in SOURCES:
        if module.startswith("distill."):
            floor_of(module)


def test_imports_go_down() -> None:
    wrong = [
        f"{where(module, line)}: {module} (floor {floor_of(module)[0]}) imports {imported} "
        f"(floor {floor_of(imported)[0]})"
        for module, tree in TREES.items()
        if module.startswith("distill.")
        for line, imported in imports_of(tree)
        if imported.split(".")[0] == "distill" and not is_allowed(module, imported)
    ]
    assert wrong == []


def test_only_the_roof_of_the_library_knows_the_pipelines() -> None:
    wrong = [
        where(module, line)
        for module, tree in TREES.items()
        if module.startswith("distill") and not is_command_line(module)
        for line, imported in imports_of(tree)
        if imported.split(".")[0] == "pipelines"
    ]
    assert wrong == []


def test_pipelines_hold_no_tensors() -> None:
    wrong = [
        where(module, line)
        for module, tree in TREES.items()
        if module.startswith("pipelines")
        for line, imported in imports_of(tree)
        if imported.split(".")[0] in ("torch", "transformers", "numpy")
    ]
    assert wrong == []


@pytest.mark.parametrize("library", BORDERS)
def test_library_is_known_in_its_place_only(library: str) -> None:
    allowed = BORDERS[library]
    wrong = [
        f"{where(module, line)} imports {library}; only {' and '.join(allowed)} may"
        for module, tree in TREES.items()
        if not any(module == place or module.startswith(f"{place}.") for place in allowed)
        for line, imported in imports_of(tree)
        if imported.split(".")[0] == library
    ]
    assert wrong == []


def calls_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name or last attribute) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, node.func.attr


def test_only_models_load_pretrained_weights() -> None:
    wrong = [
        where(module, line)
        for module, tree in TREES.items()
        if not module.startswith("distill.models")
        for line, name in calls_in(tree)
        if name == "from_pretrained"
    ]
    assert wrong == []


def test_only_the_command_line_prints_or_exits() -> None:
    wrong = [
        where(module, line)
        for module, tree in TREES.items()
        if not is_command_line(module)
        for line, name in calls_in(tree)
        if name in ("print", "exit", "breakpoint")
    ]
    assert wrong == []


def test_every_file_says_what_it_owns_and_what_it_refuses_to_know() -> None:
    short = [
        name
        for name, tree in TREES.items()
        if len([line for line in (ast.get_docstring(tree) or "").splitlines() if line]) < 2
    ]
    assert short == []


def test_files_and_functions_hold_one_idea() -> None:
    long_files = [
        f"{path.relative_to(REPOSITORY)}: {lines} lines"
        for path in SOURCES.values()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    long_functions = [
        f"{where(module, node.lineno)} {node.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long_files + long_functions == []


def test_only_the_fork_helpers_fork_a_process_that_has_computed() -> None:
    """A child whose parent's OpenMP threads are gone hangs at its first parallel product."""
    # these two run in fresh processes, which fork before they compute anything
    fresh = {"test_artifact_faults.py", "test_distill_kill.py"}
    callers = {
        path.name
        for path in (REPOSITORY / "tests").rglob("*.py")
        if "os.fork" + "(" in path.read_text(encoding="utf-8")
    }
    assert callers == {"fork_helpers.py"} | fresh


def test_no_bare_except() -> None:
    wrong = [
        where(module, node.lineno)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert wrong == []


# --- the checks themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("distill.artifacts", "distill.errors", True),
        ("distill.errors", "distill.artifacts", False),
        ("distill.losses.forward_kl", "distill.losses.base", True),
        ("distill.losses.forward_kl", "distill.vocab", False),
        ("distill.runtime.verify", "distill.runtime.stats", True),
        ("distill.runtime.verify", "distill.runtime.decode", False),
        ("distill.drafters.causal_lm", "distill.runtime.cache", True),
        ("distill.drafters.causal_lm", "distill.runtime.decode", False),
        ("distill.backends.local", "distill.runtime.decode", True),
        ("distill.stages.generate", "distill.cli.output", False),
        ("distill.cli.build", "distill.stages.generate", True),
        ("distill.stages.serve", "distill", True),
    ],
)
def test_floor_rule(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="line 1: relative import"):
        list(imports_of(ast.parse("from .base import x")))


def test_a_module_without_a_floor_is_refused() -> None:
    with pytest.raises(AssertionError, match="has no floor yet"):
        floor_of("distill.attic")
