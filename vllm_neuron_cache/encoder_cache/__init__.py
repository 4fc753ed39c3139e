"""The encoder cache: policy cores (no torch, no vllm) and, in `blocks`, the device buffer."""
