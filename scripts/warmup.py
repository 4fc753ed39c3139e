"""`vllm-neuron-cache warmup` for launchers of scripts: neuron_parallel_compile python scripts/warmup.py [options]"""

import sys

from vllm_neuron_cache.cli.main import main

sys.argv.insert(1, "warmup")
main()
