"""Thin adapters to training frameworks; each imports its framework when it is used."""
