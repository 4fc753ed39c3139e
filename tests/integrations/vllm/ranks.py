"""What each rank of a tensor-parallel engine has in its table and buffer, step by step: a class for vLLM's
`worker_extension_cls`, and the comparison of what it recorded."""

import hashlib
import itertools
import os
from typing import Any

import torch
from faults import FaultInjector

OVER_GLOO = "TEST_RANKS_OVER_GLOO"
"""Set in the environment: the ranks add up over gloo and not, as vLLM does within a machine, in shared memory."""

TAMPERINGS = ("entry dropped", "blocks swapped", "generation raised", "row changed")

if OVER_GLOO in os.environ:  # imported in the worker, before it makes its groups
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


class RankRecorder(FaultInjector):
    """Becomes a base of the worker, with its methods for `collective_rpc`."""

    def record_steps(self) -> None:
        """Starts a new record. From now on every step is recorded twice: as it is applied, and as it is over."""
        self._records: list = []
        runner, runtime = self.model_runner, self.model_runner.encoder_runtime
        if "apply" in runtime.__dict__:
            return
        apply, execute = runtime.apply, runner.execute_model

        def recorded_apply(step: Any) -> None:
            apply(step)
            self._records.append([step.seq, step.epoch, "applied", self.table()])

        def recorded_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = execute(scheduler_output, *args, **kwargs)
            step = scheduler_output.ec_manager_metadata.step
            self._records.append([step.seq, step.epoch, "executed", self.table()])
            return output

        runtime.apply, runner.execute_model = recorded_apply, recorded_execute

    def recorded_steps(self) -> list:
        """Number, epoch, moment and table of each step, in the order in which they came."""
        return self._records

    def table(self) -> dict[str, list]:
        """By key: generation, block ids, rows in each, written, why it failed, and a digest of its rows once they are
        written."""
        blocks = self.model_runner.encoder_runtime.blocks
        rows = blocks.buffer.flatten(0, 1)
        return {
            entry.key: [
                entry.generation,
                list(entry.block_ids),
                list(entry.tokens_per_block),
                entry.written,
                entry.failure,
                hashlib.sha256(rows[entry.rows.tolist()].numpy().tobytes()).hexdigest() if entry.written else None,
            ]
            for entry in blocks.table.entries()
        }

    def adds_up_over_gloo(self) -> bool:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        # Either torch.distributed itself, or vLLM's object with the same methods.
        return group.device_communicator.dist_module is torch.distributed and (
            torch.distributed.get_backend(group.device_group) == "gloo"
        )

    def tamper(self, rank: int, what: str) -> None:
        """Changes what `rank` alone has of the first written entry with several blocks."""
        if self.rank != rank:
            return
        blocks = self.model_runner.encoder_runtime.blocks
        entry = next(entry for entry in blocks.table.entries() if entry.written and len(entry.block_ids) > 1)
        if what == "entry dropped":
            del blocks.table._entries[entry.key]
        elif what == "blocks swapped":
            # As if the rank had been told so; its own check finds nothing.
            entry.block_ids = (*entry.block_ids[1::-1], *entry.block_ids[2:])
            entry.tokens_per_block = (*entry.tokens_per_block[1::-1], *entry.tokens_per_block[2:])
            entry.rows = blocks.table._entry(entry).rows
        elif what == "generation raised":
            entry.generation += 1
        elif what == "row changed":
            blocks.buffer.flatten(0, 1)[entry.rows[-1], -1] += 1
        else:
            raise ValueError(what)


def check_ranks_agree(ranks: list[list]) -> None:
    """Raises `AssertionError` at the first step in which ranks differ, naming the step, the rank and the item."""
    first, *others = ranks
    if not first:
        raise AssertionError("no step was recorded")
    for rank, records in enumerate(others, start=1):
        if len(records) != len(first):
            raise AssertionError(f"rank {rank} recorded {len(records)} times, rank 0 {len(first)} times")
        for expected, (seq, epoch, moment, table) in zip(first, records, strict=True):
            if [seq, epoch, moment] != expected[:3]:
                raise AssertionError(f"rank {rank} is at {[seq, epoch, moment]}, rank 0 at {expected[:3]}")
            for key in {**expected[3], **table}:
                there, here = expected[3].get(key), table.get(key)
                if there != here:
                    raise AssertionError(f"step {seq}, {moment}: rank {rank} has {here} of {key}, rank 0 {there}")
            if list(table) != list(expected[3]):
                raise AssertionError(f"step {seq}, {moment}: rank {rank} has its entries in another order")


def num_steps(records: list) -> int:
    """Steps recorded; raises `AssertionError` if one is missing in between, or was not recorded as over."""
    applied = [record[0] for record in records if record[2] == "applied"]
    executed = [record[0] for record in records if record[2] == "executed"]
    if applied != executed or applied != list(range(applied[0], applied[0] + len(applied))):
        raise AssertionError(f"steps applied: {applied}; executed: {executed}")
    return len(applied)


def num_evictions(records: list) -> int:
    """Entries that a step took away, not counting those that went with a reset."""
    return sum(
        key not in after[3] or after[3][key][0] != before[3][key][0]
        for before, after in itertools.pairwise(records)
        if before[1] == after[1]
        for key in before[3]
    )
