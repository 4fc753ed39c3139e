"""Traces of requests for the simulator, the planner and the benchmarks. Neither torch nor vLLM is imported here."""
