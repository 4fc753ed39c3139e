"""What the machine has: its chip, its device, what is missing for a lane."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from vllm_neuron_cache.errors import AcceptanceError, ConfigurationError
from vllm_neuron_cache.graphs.lanes import make_lane

CHIPS = ("trn2", "trn3")


def instance_type() -> str | None:
    """What `neuron-ls` says of the machine ("trn2.48xlarge"); None where there are no Neuron devices.

    Sources: its output, https://awsdocs-neuron.readthedocs-hosted.com/en/latest/tools/neuron-sys-tools/neuron-ls.html;
    the names of the devices,
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/containers/tutorials/build-run-neuron-container.html.
    """
    if not any(Path("/dev").glob("neuron[0-9]*")):
        return None
    command = shutil.which("neuron-ls", path=f"{os.environ.get('PATH', '')}:/opt/aws/neuron/bin")
    found = None
    if command is not None:
        listed = subprocess.run([command], capture_output=True, text=True, timeout=60)
        found = re.search(r"instance-type: (\S+)", listed.stdout)
    return found[1] if found else "unknown instance type"


def chip_of(instance: str | None) -> str | None:
    """Of an instance type, one of `CHIPS`; None of any other."""
    return next((chip for chip in CHIPS if (instance or "").startswith(chip)), None)


def missing_here(lane_name: str, device: str, instance: str | None, kernel: str = "compiler") -> list[str]:
    """Everything that is missing for a lane on a device, and for the kernel (one of `config.KERNELS`) in it.

    `instance` is what `instance_type` found. The device is a name: torch does not know it before its package is there.
    """
    missing = []
    is_cpu = device == "cpu"
    if not is_cpu and instance is None:
        missing.append("no Neuron device: there is no /dev/neuron0 (another instance type, or no driver)")
    try:
        make_lane(lane_name, kernel)
    except ConfigurationError as error:
        missing.append(str(error))
    if not is_cpu and not missing:
        try:
            torch.zeros(1, device=device)
        except (AssertionError, RuntimeError) as error:
            missing.append(f"torch cannot allocate on {device}: {error}")
    return missing


def require_device(lane_name: str, device: str, instance: str | None, kernel: str = "compiler") -> None:
    """Raises `AcceptanceError` that lists everything that is `missing_here`."""
    missing = missing_here(lane_name, device, instance, kernel)
    if missing:
        raise AcceptanceError(
            f"the acceptance run cannot start on this machine with lane {lane_name} on device {device}:\n- "
            + "\n- ".join(missing)
            + "\nWhat to install is in docs/trainium.md. Without a Trainium, `--lane inductor --device cpu` runs the "
            "same checks, which then say nothing of hardware."
        )
