"""Every public exception of the package.

A message says what is wrong, the sizes involved and the remedy. Classes that report a value that the caller can
change are also `ValueError`, so that code that knows nothing of this package still treats them as bad input.
"""


class NeuronCacheError(Exception):
    """Base class of every error that this package raises."""


class ConfigurationError(NeuronCacheError, ValueError):
    """A configuration value, or a combination of them, that cannot work. Raised at start-up, never in a step."""


class EncoderCacheReadError(NeuronCacheError):
    """A scheduled item cannot be read: its entry is missing, unwritten, or of another size than its placeholder."""


class EncoderOutputError(NeuronCacheError):
    """The encoder returned rows that do not fit the entry reserved for them (count, width or rank)."""


class StepProtocolError(NeuronCacheError):
    """Scheduler and worker no longer agree on the steps between them (a gap, or metadata that is missing)."""


class GraphRecompiledError(NeuronCacheError):
    """A graph was about to be compiled after warm-up: an input changed its shape, dtype, layout or mode."""


class PoolExhaustedError(NeuronCacheError):
    """Blocks were reserved without room for them: the caller did not ask `can_reserve` first."""


class IntegrityError(NeuronCacheError):
    """`check_integrity` found two records of the same thing that differ. A bug in this package."""


class DemoError(NeuronCacheError):
    """The demo or a benchmark cannot run here (something is not installed, or a file is missing)."""
