"""The command line, `vllm-neuron-cache`."""
