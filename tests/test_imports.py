"""What importing costs, what the floors may know, and what the engine can do without."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "faiss", "sentence_transformers", "opentelemetry")
FLOORS = {"ragserve": 2, "engine": 1, "kernels": 0}


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, ragserve, ragserve.engine, ragserve.pipeline.rag_pipeline\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(script).strip() == "[]"


@pytest.mark.parametrize(
    "module", ["ragserve", "ragserve.engine", "ragserve.kernels", "ragserve.bench"]
)
def test_faces_hold_what_they_list(module: str) -> None:
    face = importlib.import_module(module)
    assert len(set(face.__all__)) == len(face.__all__)
    for name in face.__all__:
        assert getattr(face, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        face.nonsense  # noqa: B018


def test_every_module_lists_its_public_names() -> None:
    for path in (p for floor in FLOORS for p in (ROOT / floor).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
        targets += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
        names = {t.id for t in targets if isinstance(t, ast.Name)}
        empty = all(isinstance(node, ast.Expr | ast.ImportFrom) for node in tree.body)
        silent = path.name == "_version.py" or (path.name == "__init__.py" and empty)
        assert silent or "__all__" in names, path
        assert ast.get_docstring(tree), path


def test_imports_go_down_and_through_the_face_only() -> None:
    for floor, height in FLOORS.items():
        for path in (ROOT / floor).rglob("*.py"):
            depth = len(path.relative_to(ROOT / floor).parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or node.level > depth:
                    assert not isinstance(node, ast.ImportFrom), f"{path} climbs out of its folder"
                    continue
                parts = (node.module or "").split(".")
                if node.level or parts[0] != "ragserve":
                    continue
                named = parts[1:2] or [alias.name for alias in node.names]
                for other in named:
                    assert FLOORS.get(other, 2) < height or floor == "ragserve", path
                if floor != "ragserve":
                    faces = 3 if parts[1:] == ["kernels", "triton"] else 2
                    assert len(parts) <= faces, f"{path} reaches behind a face: {node.module}"


@pytest.mark.parametrize("source", ["scripted", "tiny"])
def test_the_engine_needs_neither_retrieval_nor_tracing(
    source: str, tiny_model: Callable[..., Path]
) -> None:
    model = "ScriptedModel('Hello.')" if source == "scripted" else f"{str(tiny_model('llama'))!r}"
    script = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"faiss", "sentence_transformers", "opentelemetry", "triton"}}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)

sys.meta_path.insert(0, Absent())
from ragserve import LLM, SamplingParams
from ragserve.testing import ScriptedModel

with LLM({model}) as llm:
    print(len(llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids))
"""
    assert run(script).strip() == "3"
