"""Settings of hypothesis for every test: no deadline, and the same examples in every run."""

from hypothesis import settings

settings.register_profile(
    "policy", deadline=None, derandomize=True, max_examples=150, stateful_step_count=40, report_multiple_bugs=False
)
settings.load_profile("policy")
