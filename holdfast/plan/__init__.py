"""From a graph to stages, to the shape that the core knows, and running a stage."""
