"""Encoder-output and stage-output caches for vLLM on AWS Trainium.

The package adds to vLLM; it never replaces its scheduler, its hashing or its KV prefix cache. Importing it imports
neither torch nor vLLM: those sit in `encoder_cache.blocks`, `graphs` and `integrations`.
"""

__version__ = "0.1.0"
