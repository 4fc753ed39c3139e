"""NKI kernels for the cache's data movement, each with a PyTorch reference and a host function that prepares arguments.

Importing this package and the references needs neither NKI nor vLLM. Only `dialect` imports NKI.
"""
