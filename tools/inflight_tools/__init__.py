"""What an operator runs on a desk: command line, launcher, demo, simulator, trace viewers."""
