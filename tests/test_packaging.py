"""The lists of packages agree: pyproject.toml, environment.yml and constraints.txt."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"pytorch": "torch", "huggingface_hub": "huggingface-hub"}


def requirement(line: str) -> tuple[str, str]:
    """Normalised name and version range of a requirement line; a marker is dropped."""
    name, spec = re.fullmatch(r"\s*([A-Za-z0-9_.-]+)\s*([<>=~!].*)?", line.split(";")[0].strip()).groups()
    return CONDA_NAMES.get(name, name).lower().replace("_", "-"), (spec or "").strip()


def declared() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(map(requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]]))


def test_conda_environment_lists_the_same_packages():
    lines = (ROOT / "environment.yml").read_text().split("dependencies:")[1].splitlines()
    items = [line.strip().removeprefix("- ") for line in lines if line.strip() and line.strip() != "- pip:"]
    listed = dict(map(requirement, items))
    assert listed.pop("python") == ">=3.11" and "pip" in listed
    del listed["pip"]
    assert listed == declared()


def test_every_package_has_an_exact_version():
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    pinned = dict(map(requirement, lines))
    assert declared().keys() <= pinned.keys()
    assert all(re.fullmatch(r"==[0-9.]+", spec) for spec in pinned.values())
