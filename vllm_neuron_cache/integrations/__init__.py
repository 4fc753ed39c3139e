"""Adapters to serving engines. Only modules in this folder import vllm."""
