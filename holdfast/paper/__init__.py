"""The experiments of the papers again: their simulations, and Holdfast under the same conditions."""
