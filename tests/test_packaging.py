"""What pyproject.toml says of the folders is what is in them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


def test_every_folder_with_modules_is_a_listed_package() -> None:
    setuptools = SETTINGS["setuptools"]
    folders = setuptools["package-dir"]
    listed = set()
    for package in setuptools["packages"]:
        # setuptools maps the longest prefix that has an entry, and appends the rest.
        prefix = max((name for name in folders if f"{package}.".startswith(f"{name}.")), key=len)
        rest = package.removeprefix(prefix).replace(".", "/").strip("/")
        listed.add(Path(folders[prefix]) / rest)
    present = {
        path.parent.relative_to(ROOT)
        for top in folders.values()
        for path in (ROOT / top).rglob("*.py")
    }
    assert listed == present


def test_requirements_are_pinned_and_name_no_registry() -> None:
    for name in ("requirements-dev.txt", "requirements-models.txt"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        requirements = [line for line in lines if line and not line.startswith("#")]
        assert requirements
        assert all(line.count("==") == 1 and " " not in line for line in requirements), name
        assert not any(line.startswith(("-", "triton", "nvidia")) for line in requirements), name
