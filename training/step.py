"""Loss and gradients of one batch; text batches are replayed as CUDA graphs, one for each row length.

Launching kernels one by one takes this small model twice as long as running them.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from training.forward import Placed, following, run
from training.model import Miniature

DRAFT_WEIGHTS = {"trunk": 1.0, "first": 0.3, "second": 0.15}
NUM_WARMUPS = 2  # plain runs of a row length before its graph is captured
NUM_JUDGED = ((512, 8_192), (0, 24_576))  # most learned tokens that count in a batch, by least row length


def losses(model: Miniature, placed: Placed) -> dict[str, Tensor]:
    """Mean cross entropy over the learned tokens of the trunk and the drafts, and their hits; shapes never vary."""
    hidden, layout = run(model, placed)
    limit = next(limit for least, limit in NUM_JUDGED if layout.length >= least)
    found: dict[str, Tensor] = {}
    wanted = following(placed.learned, 1, layout)
    for ahead, (name, states) in enumerate(
        (("trunk", hidden.trunk), ("first", hidden.first), ("second", hidden.second)), 1
    ):
        if states is None:
            continue
        wanted = wanted & following(placed.learned, ahead, layout)
        chosen = torch.argsort(wanted, descending=True, stable=True)[:limit]
        targets = torch.where(wanted[chosen], following(placed.ids, ahead, layout)[chosen], -100)
        logits = model.logits(states[chosen])
        found[name] = F.cross_entropy(logits, targets, ignore_index=-100)
        found[f"{name}_hits"] = (logits.detach().argmax(-1) == targets).sum() / (targets >= 0).sum()
    return found


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Placed
    weight: Tensor
    found: dict[str, Tensor]


class GradientStep:
    """Adds a batch's gradients to the model's; returns the losses."""

    def __init__(self, model: Miniature, device: torch.device, use_graphs: bool) -> None:
        self._model, self._device, self._use_graphs = model, device, use_graphs
        self._runs: Counter[int] = Counter()
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if use_graphs else None
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, placed: Placed, weight: float) -> dict[str, Tensor]:
        if not self._use_graphs or placed.patches is not None:
            return self._run(placed, weight)
        if self._runs[placed.num_rows] < NUM_WARMUPS:
            self._runs[placed.num_rows] += 1
            return self._run(placed, weight)
        if placed.num_rows not in self._captured:
            self._captured[placed.num_rows] = self._capture(placed)
        captured = self._captured[placed.num_rows]
        for item in fields(Placed):
            value = getattr(placed, item.name)
            if isinstance(value, Tensor):
                getattr(captured.inputs, item.name).copy_(value)
        captured.weight.fill_(weight)
        captured.graph.replay()
        return captured.found

    def _run(self, placed: Placed, weight: float | Tensor) -> dict[str, Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            found = losses(self._model, placed)
            loss = sum(DRAFT_WEIGHTS[name] * value for name, value in found.items() if name in DRAFT_WEIGHTS)
        (loss * weight).backward()
        return {name: value.detach() for name, value in found.items()}

    def _capture(self, placed: Placed) -> _Captured:
        """Records one run; recording itself computes nothing, so the caller replays it."""
        inputs = replace(
            placed,
            ids=placed.ids.clone(),
            learned=placed.learned.clone(),
            is_pad=placed.is_pad.clone(),
            positions=placed.positions.clone(),
        )
        weight = torch.zeros((), device=self._device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = self._run(inputs, weight)
        return _Captured(graph, inputs, weight, found)
