"""vLLM's scheduler with a simulated worker: everything on the scheduler's side is the real thing."""
