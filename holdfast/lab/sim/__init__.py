"""A world without processes or sockets for the same core and the same operators."""
