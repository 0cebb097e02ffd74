"""Building a kernel from the sources in this folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

Template = Mapping[str, Any]
"""Constants and types of a kernel, by their names in the source."""

P = ParamSpec("P")
R = TypeVar("R")

_COMMENT = re.compile(r"\s*//.*")


def or_ops(form: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a kernel's function: without CUDA it is `form`, which takes and gives the same."""

    def choose(kernel: Callable[P, R]) -> Callable[P, R]:
        @wraps(kernel)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
            return (kernel if mx.cuda.is_available() else form)(*args, **kwargs)

        return chosen

    return choose


@cache
def _source(file: str) -> str:
    """A file of this folder without its comments: MLX hashes a kernel's source at every call."""
    text = files(__package__).joinpath(file).read_text()
    return "\n".join(line for each in text.splitlines() if (line := _COMMENT.sub("", each).strip())) + "\n"


class CudaKernel:
    """A kernel of the given name: sources, the names of its arguments, and the statement that is its body.

    In the body an input is a pointer by its name, `NAME_shape` its shape, and the template's names are constants.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        shared_bytes: int = 0,
    ) -> None:
        """shared_bytes: dynamic shared memory of a block."""
        self._name = name
        self._sources = tuple(sources)
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._body = body
        self._shared_bytes = shared_bytes
        self._built: Any = None

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Template,
        blocks: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Launch `blocks` of `threads`; outputs: shape and type of each."""
        if self._built is None:
            header = "".join(_source(file) for file in self._sources)
            self._built = mx.fast.cuda_kernel(
                self._name,
                list(self._inputs),
                list(self._outputs),
                self._body,
                header,
                shared_memory=self._shared_bytes,
            )
        found: list[mx.array] = self._built(
            inputs=list(inputs),
            template=list(template.items()),
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return found
