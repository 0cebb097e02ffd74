"""What the installation lacks, and the command that adds it."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

_LEAST_OPEN_FILES = 4096

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

_MLX_LIBRARY = "libmlx.so"
_BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
"""Packages that hold it, all at the same place."""


def backend_advice(error: ImportError, installed: Sequence[str], driver: Path = _NVIDIA_DRIVER) -> str | None:
    """What to install after MLX could not be imported; None for a failure that has another cause.

    MLX's compute library comes in a package for each kind of device, which environment markers can't tell apart on
    Linux. installed: those that are. driver: the file that NVIDIA's driver provides.
    """
    is_mlx_missing = error.name == "mlx" or (error.name or "").startswith("mlx.")
    if not is_mlx_missing and "mlx" not in Path(error.path or "").parts:
        return None
    if not is_mlx_missing and _MLX_LIBRARY in str(error) and installed:
        # Another one was uninstalled, and took their common file with it.
        return f"MLX's compute library is gone: `pip install --force-reinstall --no-deps {installed[0]}` puts it back"
    extra, reason = ("cuda13", "for the NVIDIA GPU here") if driver.exists() else ("cpu", "for this machine's CPU")
    install = f"`pip install 'headrace[{extra}]'` adds the one {reason}"
    if is_mlx_missing or _MLX_LIBRARY in str(error):
        return f"MLX has no compute library: {install}"
    library = str(error).partition(":")[0]
    return f"MLX's compute library needs {library}, which is not installed: {install}"


def backends_advice(installed: Sequence[str]) -> str | None:
    if len(installed) < 2:
        return None
    return (
        f"{' and '.join(installed)} are installed and hold the same file, so the one that came last runs: "
        f"`pip uninstall {' '.join(installed)}`, then install the one that you want"
    )


def installed_backends() -> Sequence[str]:
    from importlib import metadata  # takes longer than all else that `--help` imports

    names = (each.metadata["Name"] for each in metadata.distributions())
    return sorted({name for name in names if name in _BACKENDS})


def vision_advice() -> str | None:
    """How to install what images and videos need; None if it is installed.

    mlx-vlm requires 500 MB of packages that serving never imports, hence `--no-deps`.
    """
    if importlib.util.find_spec("mlx_vlm") is not None:
        return None
    from importlib import metadata

    requirement = next(one for one in metadata.requires("headrace") or () if one.startswith("mlx-vlm"))
    return f"`pip install --no-deps '{requirement.partition(';')[0].strip()}'`"


def import_command(module: str) -> Any:
    """Raises ConfigError where MLX lacks its compute library, or where mlx-lm may not open enough files."""
    try:
        return import_module(module)
    except ImportError as error:
        if (advice := backend_advice(error, installed_backends())) is None:
            raise
        raise ConfigError(advice) from error
    except ValueError as error:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not 0 <= most < _LEAST_OPEN_FILES:
            raise
        raise ConfigError(
            f"this process may open {most} files at most (ulimit -Hn), and mlx-lm needs {_LEAST_OPEN_FILES}"
        ) from error
