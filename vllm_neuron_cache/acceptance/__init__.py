"""The acceptance run of a machine with a Trainium: every claim that no CPU can prove, measured and in one report.

The same code runs on a CPU (lane `inductor`, device `cpu`), which shows that the run is right, and nothing of hardware.
"""
