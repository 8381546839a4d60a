"""Repeats the papers' experiments: their simulations, and Holdfast under the same conditions."""
