"""The reads of a step in the form that a graph with the merge inside it takes."""

import numpy as np
import torch

from vllm_neuron_cache.encoder_cache.read_plan import ReadPlan, source_rows
from vllm_neuron_cache.graphs.host_arrays import HostArrays
from vllm_neuron_cache.graphs.prefill import TEXT_ROW


class SourceRows:
    """For each token row of a step, the row of the buffer that it takes. One array, used again for every step."""

    def __init__(self, max_step_tokens: int, device: torch.device) -> None:
        """`max_step_tokens`: token rows of the longest step."""
        self.max_step_tokens = max_step_tokens
        self._rows = np.full(max_step_tokens, TEXT_ROW, dtype=np.int32)
        self._tensors = HostArrays((self._rows,), (max_step_tokens,), device)
        self._filled = False

    def fill(self, plan: ReadPlan) -> None:
        """Takes in the plan of the step that is about to run."""
        source_rows(plan, self._rows)
        self._filled = plan.num_rows > 0

    def fill_with_text(self) -> None:
        """Stands for a step that reads rows, where there are none: graphs are compiled by it."""
        self._rows.fill(TEXT_ROW)
        self._filled = True

    def take(self, num_tokens: int) -> torch.Tensor | None:
        """int32 `[num_tokens]` where the graph is, padding rows included; None if the step reads nothing. Once for each
        `fill`: what follows without one is a step of text."""
        if not self._filled:
            return None
        self._filled = False
        (rows,) = self._tensors.send(self.max_step_tokens)
        return rows[:num_tokens]
