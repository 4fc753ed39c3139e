"""`python -m vllm_neuron_cache.cli` is the command line, for environments beside the one that has its script."""

from vllm_neuron_cache.cli.main import main

main()
