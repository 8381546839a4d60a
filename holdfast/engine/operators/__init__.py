"""The built-in keyed operators, and the class for a user's own."""
