"""Imported before the package in the environment of torch_xla, which is built for an older torch than the package is:
adds the one name that is missing there, an error's."""

from torch._subclasses import fake_tensor

if not hasattr(fake_tensor, "FakeTensorDeviceMismatchError"):
    fake_tensor.FakeTensorDeviceMismatchError = type("FakeTensorDeviceMismatchError", (RuntimeError,), {})
