"""Evaluation: metrics, LFW, other benchmarks, detector and pack figures, plots."""
