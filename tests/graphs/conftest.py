"""Stand-ins of AWS's packages as fixtures."""

from vendor_stand_ins import model_builder, nki_kernels, torch_compile, torch_neuronx

__all__ = ["model_builder", "nki_kernels", "torch_compile", "torch_neuronx"]
