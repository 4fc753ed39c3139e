"""The encoder cache inside vLLM's V1 engine: plugin, cache manager, scheduler mixin, runner mixin and worker."""
