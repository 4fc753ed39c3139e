"""Benchmarks. Each compares alternatives in one run, interleaved, and reports ratios of medians or minima."""
