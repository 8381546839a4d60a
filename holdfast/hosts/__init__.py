"""Where sites run without Spark: plain processes, forked from one that has everything loaded."""
