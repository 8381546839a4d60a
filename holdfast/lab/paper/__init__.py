"""The papers' experiments again: their simulations, and Holdfast under the same conditions."""
