"""A family's image processor, from mlx-vlm: a picture to tokens and its model's inputs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.errors import ModelError
from headrace.isolation import errors_as

Pixels = npt.NDArray[np.uint8]

ProcessedPicture = tuple[tuple[int, ...], Mapping[str, npt.NDArray[Any]]]
"""The tokens that stand in a picture's place in a prompt, and the processor's arrays by name."""


class PictureProcessor:
    """Processes one picture at a time; may be called from any thread.

    placeholder_id: the token that a chat template writes where a picture belongs.
    """

    def __init__(self, processor: Any) -> None:
        """Raises ModelError for a processor without a token for pictures."""
        mark, tokenizer = getattr(processor, "image_token", None), getattr(processor, "tokenizer", None)
        if mark is None or tokenizer is None:
            raise ModelError(f"{type(processor).__name__} names no token for pictures")
        self._processor = processor
        self._mark = str(mark)
        bare = tokenizer(self._mark, add_special_tokens=False)["input_ids"]
        if len(bare) != 1:
            raise ModelError(f"the tokenizer has no single token for {self._mark!r}")
        self.placeholder_id = int(bare[0])
        marked = tokenizer(self._mark)["input_ids"]
        self._num_before = marked.index(self.placeholder_id)
        self._num_behind = len(marked) - self._num_before - 1
        self._lock = threading.Lock()

    def __call__(self, picture: Pixels) -> ProcessedPicture:
        """picture: RGB `[height, width, 3]`. Raises ValueError for one that the processor does not take."""
        name = type(self._processor).__name__
        with errors_as(lambda error: ValueError(f"{name} does not take it: {error}"), may_exit=True):
            with self._lock:  # the tokenizer library refuses two threads at once
                made = self._processor(text=[self._mark], images=[Image.fromarray(picture)])
            fields = {name: np.array(value) for name, value in made.items() if value is not None}
        ids = fields.pop("input_ids")[0].tolist()
        fields.pop("attention_mask", None)
        return tuple(ids[self._num_before : len(ids) - self._num_behind]), fields


def load_picture_processor(directory: Path, config: Mapping[str, Any]) -> PictureProcessor:
    """The processor of a checkpoint. Raises ModelError if it can't be made from the folder's files alone.

    config: its config.json.
    """
    with errors_as(lambda error: ModelError(f"the processor of {directory} can't be loaded: {error}"), may_exit=True):
        # its import registers the family's processor with transformers; a checkpoint's own code, which mlx-vlm allows
        # by default, must never run
        library = importlib.import_module("mlx_vlm.utils")
        importlib.import_module(f"mlx_vlm.models.{library.get_model_type(config)}")
        return PictureProcessor(library.load_processor(directory, add_detokenizer=False, trust_remote_code=False))
