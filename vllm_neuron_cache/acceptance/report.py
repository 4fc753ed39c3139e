"""What the acceptance run writes: its checks, and what the report of them stands for."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PUBLISHED = {
    "what": "gather of 30 images of 512 x 512 pixels, on the device outside of a graph",
    "ms": [291, 503],
    "source": "AWS Neuron documentation, 'On-Device Encoder Cache'",
}

CHECKS = (
    "merge_time",
    "no_embedding_to_host",
    "stable_pointers",
    "nothing_compiled_after_warm_up",
    "rows_exact",
    "tokens_equal",
)


class Check(NamedTuple):
    """One claim."""

    name: str
    passed: bool
    text: str
    """What was seen, with units, and what the limit is."""
    values: dict[str, Any]


@dataclass
class Report:
    """What the run found."""

    lane: str
    kernel: str
    device: str
    hardware: str | None
    """The instance type; None if this is no result of a lane for Trainium on one."""
    config: str
    model: str
    workload: dict[str, Any]
    checks: list[Check]
    versions: dict[str, str] = field(default_factory=dict)
    written_at: str = ""

    @property
    def passed(self) -> bool:
        """Whether every check was made, and passed."""
        return {check.name for check in self.checks if check.passed} == set(CHECKS)

    @property
    def note(self) -> str:
        """What the report stands for."""
        if self.hardware is None:
            return f"NO HARDWARE RESULT: lane {self.lane} on device {self.device}."
        return f"Lane {self.lane} on {self.hardware}."

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["checks"] = {check.name: check._asdict() for check in self.checks}
        return {
            "verdict": "passed" if self.passed else "failed",
            "note": self.note,
            "hardware_result": self.hardware is not None,
            **values,
            "published": PUBLISHED,
        }
