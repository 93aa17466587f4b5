"""The four stages of `pack`: measure.py, plan.py, write.py (with samples.py), index.py."""
