"""Faults to plant in a real worker, in whatever process it runs: a class for vLLM's `worker_extension_cls`.

Which item is hit is told by its number of rows, which no two photographs of the tests share. Nothing here replaces
what is tested: the encoder runs, and then its output is spoilt; entries are written, and then damaged.
"""

from typing import Any

import numpy as np

ENCODER_FAULTS = ("encoder raises", "output NaN", "output infinite", "output short", "output long", "output narrow")
ENTRY_FAULTS = ("entry missing", "entry unwritten", "entry of wrong count")
POSITION_FAULTS = ("position unfilled", "position filled twice")


class FaultInjector:
    """Becomes a base of the worker: `collective_rpc("plant_fault", args=(fault, num_rows, phase))`."""

    def plant_fault(self, fault: str, num_rows: int, phase: str = "first", times: int = 1_000_000) -> None:
        """Spoils the item of `num_rows` rows from now on, at most `times` times.

        Entries and positions are damaged as a later chunk of the item is read ("chunk"), as nothing of it is read any
        more ("decode"), or else as its first row is.
        """
        self.remove_faults()
        runner = self.model_runner
        left = [times]

        def strike() -> bool:
            left[0] -= 1
            return left[0] >= 0

        if fault in ENCODER_FAULTS:
            runner.model.embed_multimodal = _spoilt_encoder(runner.model, fault, num_rows, strike)
        elif fault in ENTRY_FAULTS + POSITION_FAULTS:
            runner._read_windows = _spoilt_windows(runner, fault, num_rows, phase, strike)
        else:
            raise ValueError(fault)

    def remove_faults(self) -> None:
        self.model_runner.model.__dict__.pop("embed_multimodal", None)
        self.model_runner.__dict__.pop("_read_windows", None)

    def resident_keys(self) -> list[tuple[str, int]]:
        """Keys and rows of the entries that can be read."""
        table = self.model_runner.encoder_runtime.blocks.table
        return [(entry.key, entry.num_tokens) for entry in table.entries() if entry.written]


def _spoilt_encoder(model: Any, fault: str, num_rows: int, strike: Any) -> Any:
    embed = type(model).embed_multimodal

    def spoilt(**inputs: Any) -> list:
        outputs = list(embed(model, **inputs))
        for index, output in enumerate(outputs):
            if len(output) != num_rows or not strike():
                continue
            if fault == "encoder raises":
                raise ValueError("planted in the encoder")
            output = output.clone()
            if fault == "output NaN":
                output[num_rows // 2, 3] = float("nan")
            elif fault == "output infinite":
                output[-1, -1] = float("inf")
            elif fault == "output short":
                output = output[:-3]
            elif fault == "output long":
                output = output[[*range(num_rows), 0]]
            elif fault == "output narrow":
                output = output[:, :-1]
            outputs[index] = output
        return outputs

    return spoilt


def _spoilt_windows(runner: Any, fault: str, num_rows: int, phase: str, strike: Any) -> Any:
    read_windows = type(runner)._read_windows
    table = runner.encoder_runtime.blocks.table
    seen = [False]

    def spoilt(scheduler_output: Any) -> list:
        windows = read_windows(runner, scheduler_output)
        concerned = [window for window in windows if window.num_tokens == num_rows]
        if phase == "decode":
            now = seen[0] and not concerned
            seen[0] = seen[0] or bool(concerned)
        else:
            concerned = [window for window in concerned if (window.first_row > 0) == (phase == "chunk")]
            now = bool(concerned)
        if not now or not strike():
            return windows
        for entry in table.entries():
            if entry.num_tokens != num_rows:
                continue
            if fault == "entry missing":
                del table._entries[entry.key]
            elif fault == "entry unwritten":
                entry.written = False
            elif fault == "entry of wrong count":
                entry.rows = entry.rows[:-1]
        if fault == "position unfilled":
            windows = [_unfilled(window) if window in concerned else window for window in windows]
        elif fault == "position filled twice":
            windows += concerned
        return windows

    return spoilt


def _unfilled(window: Any) -> Any:
    mask = np.ones(window.num_rows, dtype=bool) if window.mask is None else window.mask.copy()
    mask[np.flatnonzero(mask)[-1]] = False
    return window._replace(mask=mask)
