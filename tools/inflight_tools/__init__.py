"""The operator's tools: command line, launcher, demo, simulator, workloads, trace viewers."""
