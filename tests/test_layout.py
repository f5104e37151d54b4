"""DESIGN's rules on the shape of the code, read off the code itself."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ("data_prep", "train", "eval")
FILES = sorted(path for package in ("eyas", *STAGES) for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_stages_do_not_import_each_other_and_eyas_imports_none_but_in_the_command_line(path: Path):
    package = path.relative_to(ROOT).parts[0]
    allowed = set(STAGES) if path == ROOT / "eyas" / "cli.py" else {package}
    assert not imported(path) & set(STAGES) - allowed


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_is_pickled_or_unpickled(path: Path):
    assert not imported(path) & {"pickle", "dill", "joblib", "shelve", "marshal"}
    assert not re.search(r"torch\.(load|save)\(", path.read_text())


def test_the_starter_is_small_enough_to_be_tracked():
    assert (ROOT / "checkpoints" / "starter-smollm2" / "model.safetensors").stat().st_size <= 25e6
