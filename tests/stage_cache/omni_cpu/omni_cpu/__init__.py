"""vLLM-Omni on the CPU, for tests: it has platforms for accelerators alone, and takes others as plugins.

The folder that holds this package belongs on the path, so that the entry point beside it is found.
"""


def platform() -> str:
    return "omni_cpu.platform.CpuOmniPlatform"
