"""What all engines of this process share: the device and its memory."""

from __future__ import annotations

import gc

import mlx.core as mx

from headrace.backend import device
from headrace.config import Config
from headrace.engine.model_files import held_weights_bytes
from headrace.types.status import DeviceStatus


class ThisProcess:
    """See `EngineHost`."""

    def device_memory(self, utilization: float | None) -> int:
        here = device.current()
        return int(here.memory_bytes * here.share(utilization))

    def device(self) -> DeviceStatus:
        here = device.current()
        return DeviceStatus(here.kind, here.name, here.memory_bytes, here.num_cores)

    def memory_in_use(self) -> int:
        return device.memory_in_use()

    def weights_bytes(self, config: Config) -> int:
        return held_weights_bytes(config)

    def failure(self) -> str | None:
        return "the device is lost" if device.is_lost() else None

    def hang(self) -> str | None:
        return None

    def release_memory(self) -> None:
        is_frozen = gc.get_freeze_count() > 0
        gc.unfreeze()
        gc.collect()
        if is_frozen:
            gc.freeze()
        mx.clear_cache()
