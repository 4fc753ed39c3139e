"""What the demo, the benchmarks and the tests run on: a small model, real media, and the reference to compare with."""
