"""Hosting sites on Spark, Spark at both ends, and the flow as a Spark job.

The only package that imports pyspark.
"""
