"""The stage cache inside the autoregressive stages of vLLM-Omni."""
