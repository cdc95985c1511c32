"""Executors: what makes a placed allocation run somewhere, one package for each outside system."""
