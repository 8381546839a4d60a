"""Sites on Spark, Spark DataFrames as sources and results, and a flow as a Spark job.

This is the only package that imports pyspark.
"""
