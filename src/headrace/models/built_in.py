"""The models inside the package."""

from __future__ import annotations

from pathlib import Path

MINIATURE = Path(__file__).parent.parent / "miniature"

IN_PACKAGE = {"miniature": MINIATURE, "miniature-draft": MINIATURE / "draft"}


def built_in_folder(name: str) -> Path | None:
    """The folder of a model inside the package; a folder of that name in the working directory takes precedence."""
    return None if Path(name).expanduser().is_dir() else IN_PACKAGE.get(name)
